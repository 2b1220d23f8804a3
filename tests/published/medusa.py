"""Published layouts of Medusa heads.

Not one of the files was at hand: keys, shapes and dtypes are put together from what lists or writes them, and checked
against the sizes of the files on the hub where these are known.
"""

from __future__ import annotations

from published import Published

SIZES = {4096: 32, 32000: 96, 128256: 96, 32: 4, 8: 2, 128: 8, 11008: 48, 14336: 48, 1024: 16}

# Keys: InternLM/lmdeploy#1180 lists those of medusa-vicuna-13b-v1.3; medusa/model/medusa_model.py of
# FasterDecoding/Medusa e2a5d20 makes them. Config: the hub's page of it, wrong count included (Medusa#76, and "fix the
# uploaded config" in medusa_model.py). The file has 1,478,537,775 bytes: five heads of 147,853,312 float16.
VICUNA_7B_V1_3 = Published(
    name="FasterDecoding/medusa-vicuna-7b-v1.3",
    source="https://huggingface.co/FasterDecoding/medusa-vicuna-7b-v1.3",
    config={
        "base_model_name_or_path": "lmsys/vicuna-7b-v1.3",
        "medusa_num_heads": 2,
        "medusa_num_layers": 1,
        "transformers_version": "4.31.0",
    },
    tensors={
        "0.0.linear.weight": ("float16", (4096, 4096)),
        "0.0.linear.bias": ("float16", (4096,)),
        "0.1.weight": ("float16", (32000, 4096)),
        "1.0.linear.weight": ("float16", (4096, 4096)),
        "1.0.linear.bias": ("float16", (4096,)),
        "1.1.weight": ("float16", (32000, 4096)),
        "2.0.linear.weight": ("float16", (4096, 4096)),
        "2.0.linear.bias": ("float16", (4096,)),
        "2.1.weight": ("float16", (32000, 4096)),
        "3.0.linear.weight": ("float16", (4096, 4096)),
        "3.0.linear.bias": ("float16", (4096,)),
        "3.1.weight": ("float16", (32000, 4096)),
        "4.0.linear.weight": ("float16", (4096, 4096)),
        "4.0.linear.bias": ("float16", (4096,)),
        "4.1.weight": ("float16", (32000, 4096)),
    },
    sizes=SIZES,
    file="medusa_lm_head.pt",
)

# Keys: layers/medusa.py of text-generation-inference 91560ed, MedusaHeadV1. Config: the hub's page of it. The file has
# 887 MB: three heads of two bytes a weight.
MISTRAL_TGI = Published(
    name="text-generation-inference/Mistral-7B-Instruct-v0.2-medusa",
    source="https://huggingface.co/text-generation-inference/Mistral-7B-Instruct-v0.2-medusa",
    config={
        "base_model_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "transformers_version": "4.38.1",
    },
    tensors={
        "0.0.linear.bias": ("bfloat16", (4096,)),
        "0.0.linear.weight": ("bfloat16", (4096, 4096)),
        "0.1.weight": ("bfloat16", (32000, 4096)),
        "1.0.linear.bias": ("bfloat16", (4096,)),
        "1.0.linear.weight": ("bfloat16", (4096, 4096)),
        "1.1.weight": ("bfloat16", (32000, 4096)),
        "2.0.linear.bias": ("bfloat16", (4096,)),
        "2.0.linear.weight": ("bfloat16", (4096, 4096)),
        "2.1.weight": ("bfloat16", (32000, 4096)),
    },
    sizes=SIZES,
    file="medusa_lm_head.safetensors",
)

# Keys: MedusaHeadV2 of the same file, and medusa/train/train_legacy.py of FasterDecoding/Medusa e2a5d20, which writes
# them from bfloat16 heads without LM heads. Config: the hub's page of it. Of predibase's heads of this kind for Mistral
# 7B (Mistral-7B-Instruct-v0.2-magicoder-medusa) the file has 101 MB: three blocks and nothing else.
ZEPHYR_VERSION_2 = Published(
    name="real-jiakai/zephyr_medusa_demo",
    source="https://huggingface.co/real-jiakai/zephyr_medusa_demo/blob/cdd11484/config.json",
    config={
        "base_model_name_or_path": "HuggingFaceH4/zephyr-7b-beta",
        "medusa_num_heads": 3,
        "medusa_num_layers": 1,
        "transformers_version": "4.46.2",
        "version": "2",
    },
    tensors={
        "0.0.linear.bias": ("bfloat16", (4096,)),
        "0.0.linear.weight": ("bfloat16", (4096, 4096)),
        "1.0.linear.bias": ("bfloat16", (4096,)),
        "1.0.linear.weight": ("bfloat16", (4096, 4096)),
        "2.0.linear.bias": ("bfloat16", (4096,)),
        "2.0.linear.weight": ("bfloat16", (4096, 4096)),
    },
    sizes=SIZES,
    file="medusa_lm_head.safetensors",
)

# Config: the hub's page of it: heads without blocks, which the original's `Sequential(*[], Linear)` numbers 0.
MISTRAL_NO_BLOCKS = Published(
    name="Narsil/mistral-medusa",
    source="https://huggingface.co/Narsil/mistral-medusa/blob/main/config.json",
    config={
        "base_model_name_or_path": "mistralai/Mistral-7B-Instruct-v0.2",
        "medusa_num_heads": 2,
        "medusa_num_layers": 0,
        "transformers_version": "4.36.1",
    },
    tensors={
        "0.0.weight": ("float16", (32000, 4096)),
        "1.0.weight": ("float16", (32000, 4096)),
    },
    sizes=SIZES,
    file="medusa_lm_head.pt",
)

# Keys: pytorch_model.bin.index.json of it, whose total_size is that of Vicuna 7B and five heads in float16. Layers 1 to
# 31 of the model repeat those of layer 0. Config: EmbeddedLLM/Medusa2-Mistral-7B-Instruct-v0.2 (refs/pr/2) spells the
# two counts so; two of FasterDecoding's three had neither (Medusa#76).
VICUNA_7B_V1_5 = Published(
    name="FasterDecoding/medusa-v1.0-vicuna-7b-v1.5",
    source="https://huggingface.co/FasterDecoding/medusa-v1.0-vicuna-7b-v1.5/blob/main/pytorch_model.bin.index.json",
    config={
        "architectures": ["LlamaForCausalLM"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "medusa_num_heads": 5,
        "medusa_num_layers": 1,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    tensors={
        "lm_head.weight": ("float16", (32000, 4096)),
        "medusa_head.0.0.linear.bias": ("float16", (4096,)),
        "medusa_head.0.0.linear.weight": ("float16", (4096, 4096)),
        "medusa_head.0.1.weight": ("float16", (32000, 4096)),
        "medusa_head.1.0.linear.bias": ("float16", (4096,)),
        "medusa_head.1.0.linear.weight": ("float16", (4096, 4096)),
        "medusa_head.1.1.weight": ("float16", (32000, 4096)),
        "medusa_head.2.0.linear.bias": ("float16", (4096,)),
        "medusa_head.2.0.linear.weight": ("float16", (4096, 4096)),
        "medusa_head.2.1.weight": ("float16", (32000, 4096)),
        "medusa_head.3.0.linear.bias": ("float16", (4096,)),
        "medusa_head.3.0.linear.weight": ("float16", (4096, 4096)),
        "medusa_head.3.1.weight": ("float16", (32000, 4096)),
        "medusa_head.4.0.linear.bias": ("float16", (4096,)),
        "medusa_head.4.0.linear.weight": ("float16", (4096, 4096)),
        "medusa_head.4.1.weight": ("float16", (32000, 4096)),
        "model.embed_tokens.weight": ("float16", (32000, 4096)),
        "model.layers.0.input_layernorm.weight": ("float16", (4096,)),
        "model.layers.0.mlp.down_proj.weight": ("float16", (4096, 11008)),
        "model.layers.0.mlp.gate_proj.weight": ("float16", (11008, 4096)),
        "model.layers.0.mlp.up_proj.weight": ("float16", (11008, 4096)),
        "model.layers.0.post_attention_layernorm.weight": ("float16", (4096,)),
        "model.layers.0.self_attn.k_proj.weight": ("float16", (4096, 4096)),
        "model.layers.0.self_attn.o_proj.weight": ("float16", (4096, 4096)),
        "model.layers.0.self_attn.q_proj.weight": ("float16", (4096, 4096)),
        "model.layers.0.self_attn.v_proj.weight": ("float16", (4096, 4096)),
        "model.norm.weight": ("float16", (4096,)),
    },
    sizes=SIZES,
    file="pytorch_model-00001-of-00002.bin",
)

# Keys: HFMedusaModel in modelopt/torch/speculative/plugins/transformers.py of NVIDIA/Model-Optimizer 0309c19 names the
# modules and writes `medusa` into the config, which tensorrt_llm/models/medusa/config.py of NVIDIA/TensorRT-LLM 084a884
# reads. Of the model one layer is given.
MODELOPT = Published(
    name="ModelOpt, Llama 3.1 8B with Medusa heads",
    source="https://github.com/NVIDIA/Model-Optimizer/blob/0309c19/modelopt/torch/speculative/plugins/transformers.py",
    config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1},
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    tensors={
        "lm_head.weight": ("bfloat16", (128256, 4096)),
        "medusa_heads.0.0.linear.bias": ("bfloat16", (4096,)),
        "medusa_heads.0.0.linear.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.0.1.weight": ("bfloat16", (128256, 4096)),
        "medusa_heads.1.0.linear.bias": ("bfloat16", (4096,)),
        "medusa_heads.1.0.linear.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.1.1.weight": ("bfloat16", (128256, 4096)),
        "model.embed_tokens.weight": ("bfloat16", (128256, 4096)),
        "model.layers.0.input_layernorm.weight": ("bfloat16", (4096,)),
        "model.layers.0.mlp.down_proj.weight": ("bfloat16", (4096, 14336)),
        "model.layers.0.mlp.gate_proj.weight": ("bfloat16", (14336, 4096)),
        "model.layers.0.mlp.up_proj.weight": ("bfloat16", (14336, 4096)),
        "model.layers.0.post_attention_layernorm.weight": ("bfloat16", (4096,)),
        "model.layers.0.self_attn.k_proj.weight": ("bfloat16", (1024, 4096)),
        "model.layers.0.self_attn.o_proj.weight": ("bfloat16", (4096, 4096)),
        "model.layers.0.self_attn.q_proj.weight": ("bfloat16", (4096, 4096)),
        "model.layers.0.self_attn.v_proj.weight": ("bfloat16", (1024, 4096)),
        "model.norm.weight": ("bfloat16", (4096,)),
    },
    sizes=SIZES,
)

# Keys: load_medusa_hf in tensorrt_llm/models/medusa/weight.py (is_modelopt_ckpt) of NVIDIA/TensorRT-LLM reads them, for
# nvidia/Llama-3.1-8B-Medusa-FP8; "Only the weights and activations of the linear operators within transformers blocks
# and Medusa heads are quantized" (its model card). Of the model two tensors are given.
MODELOPT_FP8 = Published(
    name="nvidia/Llama-3.1-8B-Medusa-FP8",
    source="https://github.com/NVIDIA/TensorRT-LLM/blob/main/tensorrt_llm/models/medusa/weight.py",
    config={
        "architectures": ["LlamaForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "medusa": {"num_medusa_heads": 2, "num_medusa_layers": 1},
        "model_type": "llama",
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    tensors={
        "lm_head.weight": ("bfloat16", (128256, 4096)),
        "medusa_heads.0.0.linear.bias": ("bfloat16", (4096,)),
        "medusa_heads.0.0.linear.input_scale": ("float32", ()),
        "medusa_heads.0.0.linear.weight": ("float8_e4m3fn", (4096, 4096)),
        "medusa_heads.0.0.linear.weight_scale": ("float32", ()),
        "medusa_heads.0.1.input_scale": ("float32", ()),
        "medusa_heads.0.1.weight": ("float8_e4m3fn", (128256, 4096)),
        "medusa_heads.0.1.weight_scale": ("float32", ()),
        "medusa_heads.1.0.linear.bias": ("bfloat16", (4096,)),
        "medusa_heads.1.0.linear.input_scale": ("float32", ()),
        "medusa_heads.1.0.linear.weight": ("float8_e4m3fn", (4096, 4096)),
        "medusa_heads.1.0.linear.weight_scale": ("float32", ()),
        "medusa_heads.1.1.input_scale": ("float32", ()),
        "medusa_heads.1.1.weight": ("float8_e4m3fn", (128256, 4096)),
        "medusa_heads.1.1.weight_scale": ("float32", ()),
        "model.embed_tokens.weight": ("bfloat16", (128256, 4096)),
    },
    sizes=SIZES,
)

# Keys: vllm/model_executor/models/medusa.py of vllm-project/vllm 09cddad. Config: the commit 53b582b of it on the hub,
# which also gives the file's size, 1,478,493,144 bytes: five heads of two bytes a weight, without biases.
VLLM = Published(
    name="abhigoyal/vllm-medusa-vicuna-7b-v1.3",
    source="https://huggingface.co/abhigoyal/vllm-medusa-vicuna-7b-v1.3/commit/53b582b4",
    config={
        "_name_or_path": "abhigoyal/vllm-medusa-vicuna-7b-v1.3",
        "architectures": ["MedusaModel"],
        "hidden_size": 4096,
        "model_type": "medusa",
        "num_heads": 5,
        "num_hidden_layers": 1,
        "transformers_version": "4.41.2",
        "truncated_vocab_size": None,
        "vocab_size": 32000,
    },
    tensors={
        "blocks.0.layers.0.weight": ("float16", (4096, 4096)),
        "blocks.1.layers.0.weight": ("float16", (4096, 4096)),
        "blocks.2.layers.0.weight": ("float16", (4096, 4096)),
        "blocks.3.layers.0.weight": ("float16", (4096, 4096)),
        "blocks.4.layers.0.weight": ("float16", (4096, 4096)),
        "lm_heads.0.weight": ("float16", (32000, 4096)),
        "lm_heads.1.weight": ("float16", (32000, 4096)),
        "lm_heads.2.weight": ("float16", (32000, 4096)),
        "lm_heads.3.weight": ("float16", (32000, 4096)),
        "lm_heads.4.weight": ("float16", (32000, 4096)),
    },
    sizes=SIZES,
)

# The same file of vLLM: one LM head for all (original_lm_head), of the ids in token_map only, biases (medusa_fc_bias),
# several layers, and the prefix that it strips. No published checkpoint of this kind was found; sizes are ours.
VLLM_TRUNCATED = Published(
    name="vLLM, truncated vocabulary",
    source="https://github.com/vllm-project/vllm/blob/09cddad/vllm/model_executor/models/medusa.py",
    config={
        "architectures": ["MedusaModel"],
        "hidden_size": 4096,
        "logit_scale": 0.5,
        "medusa_fc_bias": True,
        "model_type": "medusa",
        "num_heads": 2,
        "num_hidden_layers": 2,
        "original_lm_head": True,
        "truncated_vocab_size": 16000,
        "vocab_size": 32000,
    },
    tensors={
        "medusa_heads.blocks.0.layers.0.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.blocks.0.layers.0.bias": ("bfloat16", (4096,)),
        "medusa_heads.blocks.0.layers.1.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.blocks.0.layers.1.bias": ("bfloat16", (4096,)),
        "medusa_heads.blocks.1.layers.0.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.blocks.1.layers.0.bias": ("bfloat16", (4096,)),
        "medusa_heads.blocks.1.layers.1.weight": ("bfloat16", (4096, 4096)),
        "medusa_heads.blocks.1.layers.1.bias": ("bfloat16", (4096,)),
        "medusa_heads.lm_head.weight": ("bfloat16", (16000, 4096)),
        "token_map": ("int64", (16000,)),
    },
    sizes={**SIZES, 16000: 60},
)

ALL = (
    *(VICUNA_7B_V1_3, MISTRAL_TGI, ZEPHYR_VERSION_2, MISTRAL_NO_BLOCKS, VICUNA_7B_V1_5),
    *(MODELOPT, MODELOPT_FP8, VLLM, VLLM_TRUNCATED),
)
