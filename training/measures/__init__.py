"""What a report is made of: prompts and jobs, counts, costs, tables and pictures."""
