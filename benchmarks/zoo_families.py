"""Models by other people, built from a configuration without any weights: transformers, timm,
torchvision, peft adapters, diffusers, and small ones that torch alone can build.

`FAMILIES` maps a name to a function of a size ("tiny" or "usual") that gives a model and a function
of the batch that gives its inputs. Families of packages that are not installed are left out.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Inputs = Callable[[int], dict[str, Tensor]]
Build = Callable[[str], tuple[nn.Module, Inputs]]


def _words(names: str) -> list[str]:
    return names.split()


TEXT = {
    "causal": {
        kind: f"{kind}ForCausalLM"
        for kind in _words(
            "Llama Mistral Qwen2 Qwen3 Gemma Gemma2 Phi Phi3 GPTNeoX Cohere Olmo Olmo2 StableLm Starcoder2 "
            "GPTBigCode GPTJ GPTNeo OPT Bloom Falcon Mpt CodeGen Granite Nemotron Persimmon Mixtral Qwen2Moe "
            "Qwen3Moe Olmoe Mamba Mamba2 FalconMamba Rwkv RecurrentGemma DeepseekV2 DeepseekV3 Glm Glm4 "
            "Helium SmolLM3 XGLM BioGpt Zamba Bamba Jamba Ernie4_5 Arcee Apertus"
        )
    }
    | {
        "GPT2": "GPT2LMHeadModel",
        "CTRL": "CTRLLMHeadModel",
        "OpenAIGPT": "OpenAIGPTLMHeadModel",
        "XLNet": "XLNetLMHeadModel",
    },
    "masked": {
        kind: f"{kind}ForSequenceClassification"
        for kind in _words(
            "Bert Roberta DistilBert Albert Electra Deberta DebertaV2 MPNet Camembert XLMRoberta Ernie "
            "ConvBert SqueezeBert MobileBert Funnel Longformer BigBird RoFormer Nystromformer Yoso FNet "
            "IBert MegatronBert Mra Esm ModernBert RemBert Xmod LayoutLM"
        )
    },
    "pooled": {kind: f"{kind}Model" for kind in _words("Bert Roberta Electra Albert")},
    "seq2seq": {
        kind: f"{kind}ForConditionalGeneration"
        for kind in _words(
            "T5 MT5 UMT5 Bart MBart Pegasus Blenderbot BlenderbotSmall M2M100 LED ProphetNet "
            "SwitchTransformers LongT5 PegasusX BigBirdPegasus PLBart NllbMoe"
        )
    }
    | {"Marian": "MarianMTModel"},
}
IMAGES = {
    kind: f"{kind}ForImageClassification"
    for kind in _words(
        "ViT DeiT Beit Swin Swinv2 ConvNext ConvNextV2 Dinov2 Levit Cvt PoolFormer Segformer MobileViT "
        "MobileViTV2 SwiftFormer FocalNet PvtV2 Pvt ResNet RegNet MobileNetV1 MobileNetV2 ViTMSN "
        "Data2VecVision Bit Hiera Siglip CLIP"
    )
} | {"ViTMAE": "ViTMAEForPreTraining", "DPT": "DPTForSemanticSegmentation"}
AUDIO = {
    kind: f"{kind}ForSequenceClassification"
    for kind in _words("Wav2Vec2 Hubert WavLM SEW SEWD UniSpeech UniSpeechSat Data2VecAudio")
}
CONFIGS = {"XLMRoberta": "XLMRoberta", "Siglip": "SiglipVision"}

SIZES = {
    "tiny": {
        "width": 16,
        "layers": 2,
        "heads": 2,
        "inner": 24,
        "vocabulary": 40,
        "length": 8,
        "image": 32,
        "batch": 3,
    },
    "usual": {
        "width": 256,
        "layers": 4,
        "heads": 4,
        "inner": 1024,
        "vocabulary": 4000,
        "length": 64,
        "image": 64,
        "batch": 8,
    },
}


def _config(kind: str, size: dict[str, int]) -> Any:
    """The configuration of `kind` with small numbers wherever it has such a number."""
    import transformers

    kind = CONFIGS.get(kind, kind)
    found = getattr(transformers, f"{kind}Config")
    w, n, h, inner, vocabulary = (
        size[k] for k in ("width", "layers", "heads", "inner", "vocabulary")
    )
    names: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": w,
        "d_model": w,
        "n_embd": w,
        "embed_dim": w,
        "dim": w,
        "num_hidden_layers": n,
        "num_layers": n,
        "n_layer": n,
        "n_layers": n,
        "encoder_layers": n,
        "decoder_layers": n,
        "num_decoder_layers": n,
        "num_encoder_layers": n,
        "num_attention_heads": h,
        "num_heads": h,
        "n_head": h,
        "n_heads": h,
        "encoder_attention_heads": h,
        "decoder_attention_heads": h,
        "num_encoder_attention_heads": h,
        "num_decoder_attention_heads": h,
        "num_key_value_heads": h,
        "intermediate_size": inner,
        "n_inner": inner,
        "d_ff": inner,
        "d_inner": inner,
        "encoder_ffn_dim": inner,
        "ffn_dim": inner,
        "decoder_ffn_dim": inner,
        "hidden_dim": inner,
        "d_kv": w // h,
        "head_dim": w // h,
        "d_head": w // h,
        "kv_channels": w // h,
        "dff": inner,
        "max_position_embeddings": 2 * size["length"] + 4,
        "n_positions": 2 * size["length"] + 4,
        "embedding_size": w,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "word_embed_proj_dim": w,
        "word_embed_dim": w,
        "num_labels": 3,
        "use_cache": False,
        "moe_intermediate_size": inner // 2,
        "shared_expert_intermediate_size": inner // 2,
        "n_routed_experts": 4,
        "num_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": w,
        "kv_lora_rank": w // 2,
        "qk_rope_head_dim": w // h // 2,
        "qk_nope_head_dim": w // h // 2,
        "v_head_dim": w // h,
        "n_group": 2,
        "topk_group": 1,
        "state_size": 4,
        "conv_kernel": 4,
        "time_step_rank": 4,
        "image_size": size["image"],
        "attention_window": 4,
        "block_size": 2,
        "num_random_blocks": 1,
        "block_sizes": [1, 1],
        "rotary_dim": w // h // 2,
        "initializer_range": 0.2,
        "init_std": 0.2,
        "lru_width": w,
        "attention_window_size": 4,
        "position_buckets": 4,
        "patch_size": size["image"] // 8,
        "conv_dim": (w,) * 3,
        "conv_kernel_audio": 0,
        "num_conv_pos_embeddings": 4,
        "num_conv_pos_embedding_groups": 2,
        "classifier_proj_size": w,
        "layerdrop": 0.0,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "hidden_size_per_layer_input": 0,
        "mamba_n_heads": h,
        "mamba_d_state": 4,
        "mamba_d_head": 2 * w // h,
        "mamba_n_groups": 1,
        "decoder_hidden_size": w,
        "decoder_num_hidden_layers": 1,
        "decoder_num_attention_heads": h,
        "decoder_intermediate_size": inner,
        "embedding_dim": w,
        "intra_bottleneck_size": w // 2,
        "local_attention": 4,
        "global_rope_theta": 1e4,
        "attention_hidden_size": w,
    }
    special: dict[str, dict[str, Any]] = {
        "Mamba2": {
            "num_heads": 2 * h,
            "head_dim": w // h,
            "n_groups": 1,
            "expand": 2,
            "chunk_size": 4,
        },
        "Bamba": {"attn_layer_indices": [1]},
        "Swin": {
            "embed_dim": w // 2,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "patch_size": 4,
        },
        "Swinv2": {
            "embed_dim": w // 2,
            "depths": [2, 2],
            "num_heads": [2, 2],
            "window_size": 4,
            "patch_size": 4,
        },
        "ConvNext": {"hidden_sizes": [w, w], "depths": [1, 2], "num_stages": 2, "patch_size": 4},
        "ConvNextV2": {"hidden_sizes": [w, w], "depths": [1, 2], "num_stages": 2, "patch_size": 4},
        "Hiera": {
            "image_size": [size["image"]] * 2,
            "embed_dim": w,
            "num_heads": [2, 2],
            "depths": [1, 1],
            "masked_unit_size": [4, 4],
            "query_stride": [2, 2],
            "num_query_pool": 1,
            "patch_size": [7, 7],
        },
        "MobileViT": {
            "hidden_sizes": [16, 16, 16],
            "neck_hidden_sizes": [8, 8, 16, 16, 16, 16, 16],
            "patch_size": 2,
        },
        "SwiftFormer": {"embed_dims": [16, 16, 16, 16], "depths": [1, 1, 1, 1]},
        "PoolFormer": {
            "hidden_sizes": [w] * 4,
            "depths": [1] * 4,
            "num_encoder_blocks": 4,
            "patch_size": 7,
        },
        "FocalNet": {
            "embed_dim": w,
            "hidden_sizes": [w, 2 * w],
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
            "patch_size": 4,
        },
        "Segformer": {
            "hidden_sizes": [w] * 4,
            "depths": [1] * 4,
            "num_attention_heads": [1, 2, 2, 2],
        },
        "PvtV2": {"hidden_sizes": [w] * 4, "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 2]},
        "Pvt": {
            "hidden_sizes": [w] * 4,
            "depths": [1] * 4,
            "num_attention_heads": [1, 2, 2, 2],
            "patch_sizes": [4, 2, 2, 2],
        },
        "Cvt": {"embed_dim": [w] * 3, "num_heads": [1, 1, 2], "depth": [1, 1, 1]},
        "Levit": {
            "hidden_sizes": [w, w, w],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
            "image_size": 64,
        },
        "ResNet": {
            "embedding_size": 8,
            "hidden_sizes": [16, 16],
            "depths": [1, 1],
            "layer_type": "basic",
        },
        "RegNet": {
            "embedding_size": 8,
            "hidden_sizes": [16, 16],
            "depths": [1, 1],
            "groups_width": 8,
        },
        "Bit": {"embedding_size": 32, "hidden_sizes": [32, 32], "depths": [1, 1], "num_groups": 8},
        "MobileNetV1": {"depth_multiplier": 0.25},
        "MobileNetV2": {"depth_multiplier": 0.25},
        "DPT": {
            "backbone_out_indices": [0, 1, 1, 1],
            "neck_hidden_sizes": [8] * 4,
            "fusion_hidden_size": 8,
            "reassemble_factors": [1, 1, 1, 1],
            "is_hybrid": False,
            "auxiliary_loss_weight": 0.0,
        },
        "Funnel": {"block_sizes": [1, 1], "num_decoder_layers": 1, "d_head": w // h, "n_head": h},
        "Canine": {"num_hash_buckets": 16, "local_transformer_stride": 16, "downsampling_rate": 2},
        "Xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
        "SqueezeBert": {
            "q_groups": 2,
            "k_groups": 2,
            "v_groups": 2,
            "intermediate_groups": 2,
            "output_groups": 2,
        },
        "SEW": {"conv_dim": (w,) * 3, "squeeze_factor": 2},
        "SEWD": {"conv_dim": (w,) * 3, "squeeze_factor": 2},
        "XLNet": {"d_head": w // h},
        "Rwkv": {"attention_hidden_size": w, "intermediate_size": inner, "context_length": 64},
        "RecurrentGemma": {"block_types": ["recurrent", "attention"]},
        "Phi3": {"original_max_position_embeddings": 64},
        "Esm": {"position_embedding_type": "rotary", "mask_token_id": 3},
        "Mpt": {"max_seq_len": 64, "expansion_ratio": 2},
        "GPTNeo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
        "Nystromformer": {"num_landmarks": 2, "segment_means_seq_len": size["length"]},
        "BigBird": {"attention_type": "original_full"},
        "BigBirdPegasus": {"attention_type": "original_full"},
        "PegasusX": {"block_size": 4},
        "LongT5": {"local_radius": 3},
        "Deberta": {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 8,
        },
        "DebertaV2": {
            "relative_attention": True,
            "pos_att_type": ["c2p", "p2c"],
            "max_relative_positions": 8,
        },
        "MobileBert": {"true_hidden_size": w // 2, "intra_bottleneck_size": w // 2},
        "Jamba": {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "use_mamba_kernels": False,
            "mamba_dt_rank": 4,
        },
        "Zamba": {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "use_mamba_kernels": False,
            "n_mamba_heads": 2,
            "num_hidden_layers": 4,
            "attention_head_dim": 2 * w // h,
            "attention_hidden_size": 2 * w,
        },
        "Data2VecVision": {"use_relative_position_bias": True},
        "Beit": {"use_relative_position_bias": True},
        "OPT": {"word_embed_proj_dim": w},
        "OpenAIGPT": {"afn": "gelu"},
    }
    audio = {
        "conv_dim": (w,) * 3,
        "conv_stride": (5, 2, 2),
        "conv_kernel": (10, 3, 3),
        "num_feat_extract_layers": 3,
        "mask_time_prob": 0.0,
        "apply_spec_augment": False,
    }
    chosen = names | (audio if kind in AUDIO else {}) | special.get(kind, {})
    plain = found()
    known = {
        name: value
        for name, value in chosen.items()
        if hasattr(plain, name) or name in special.get(kind, {})
    }
    if kind not in AUDIO and not isinstance(getattr(plain, "conv_kernel", 0), int):
        known.pop("conv_kernel", None)
    known |= {
        name: 0.0
        for name, value in plain.to_dict().items()
        if isinstance(value, float) and ("drop" in name or name.endswith("_pdrop"))
    }
    return found(**known)


def _hugging_face(kind: str, name: str, inputs: Callable[[Any, dict[str, int]], Inputs]) -> Build:
    def build(size: str) -> tuple[nn.Module, Inputs]:
        import transformers

        numbers = SIZES[size]
        config = _config(kind, numbers)
        if hasattr(config, "_attn_implementation"):
            pass
        torch.manual_seed(0)
        return getattr(transformers, name)(config), inputs(config, numbers)

    return build


def _tokens(*names: str) -> Callable[[Any, dict[str, int]], Inputs]:
    def made(config: Any, size: dict[str, int]) -> Inputs:
        return lambda batch: {
            name: torch.randint(3, size["vocabulary"], (batch, size["length"])) for name in names
        }

    return made


def _pixels(config: Any, size: dict[str, int]) -> Inputs:
    side = getattr(config, "image_size", size["image"])
    side = side[0] if isinstance(side, list | tuple) else side
    side = side if isinstance(side, int) and side <= 64 else size["image"]
    return lambda batch: {"pixel_values": torch.randn(batch, 3, side, side)}


def _sound(config: Any, size: dict[str, int]) -> Inputs:
    return lambda batch: {"input_values": torch.randn(batch, 50 * size["length"])}


def _images(package: str, name: str, **options: Any) -> Build:
    """An image model of timm or torchvision at 64 pixels."""

    def build(size: str) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        side = 64 if size == "tiny" else 96
        if package == "timm":
            import timm

            model = timm.create_model(name, num_classes=5, **options)
            given = getattr(model, "default_cfg", {})
            if given.get("fixed_input_size"):
                try:
                    model = timm.create_model(name, num_classes=5, img_size=side, **options)
                except (TypeError, AssertionError):
                    side = given["input_size"][-1]
        else:
            import torchvision

            model = torchvision.models.get_model(name, num_classes=5, **options)
        return model, lambda batch: {"x": torch.randn(batch, 3, side, side)}

    return build


def _adapter(config: str, base: str = "Llama", **options: Any) -> Build:
    """A peft adapter on a small language model."""

    def build(size: str) -> tuple[nn.Module, Inputs]:
        import peft

        model, inputs = _hugging_face(base, f"{base}ForCausalLM", _tokens("input_ids"))(size)
        made = getattr(peft, config)(task_type="CAUSAL_LM", **options)
        return peft.get_peft_model(model, made), inputs

    return build


_BOTH = {"target_modules": ["q_proj", "v_proj"]}
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", {"r": 4, **_BOTH}),
    "rsLoRA": ("LoraConfig", {"r": 4, "use_rslora": True, **_BOTH}),
    "DoRA": ("LoraConfig", {"r": 4, "use_dora": True, **_BOTH}),
    "IA3": (
        "IA3Config",
        {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    ),
    "prompt tuning": ("PromptTuningConfig", {"num_virtual_tokens": 3}),
    "prefix tuning": ("PrefixTuningConfig", {"num_virtual_tokens": 3}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 3, "encoder_hidden_size": 8}),
    "VeRA": ("VeraConfig", {"r": 4, **_BOTH}),
    "AdaLoRA": ("AdaLoraConfig", {"init_r": 4, "total_step": 100, **_BOTH}),
    "OFT": ("OFTConfig", {"oft_block_size": 4, **_BOTH}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, **_BOTH}),
    "HRA": ("HRAConfig", {"r": 4, **_BOTH}),
    "LoHa": ("LoHaConfig", {"r": 4, **_BOTH}),
    "LoKr": ("LoKrConfig", {"r": 4, **_BOTH}),
    "LN tuning": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "VB-LoRA": ("VBLoRAConfig", {"r": 4, "num_vectors": 8, "vector_length": 8, "topk": 2, **_BOTH}),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, **_BOTH}),
    "SHiRA": ("ShiraConfig", {"r": 2, **_BOTH}),
    "Bone": ("MissConfig", {"r": 4, **_BOTH}),
    "RandLoRA": ("RandLoraConfig", {"r": 4, **_BOTH}),
}

TIMM = _words(
    "resnet18 resnext26ts regnetx_002 densenet121 mobilenetv3_small_050 efficientnet_b0 convnext_atto "
    "convnextv2_atto vit_tiny_patch16_224 deit_tiny_patch16_224 swin_tiny_patch4_window7_224 "
    "swinv2_cr_tiny_224 levit_128s poolformerv2_s12 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 cait_xxs24_224 "
    "pit_ti_224 coat_lite_tiny xcit_nano_12_p16_224 edgenext_xx_small mobilevit_xxs mobileone_s0 repvgg_a0 "
    "ghostnet_050 hrnet_w18_small dla34 vovnet39a nfnet_f0 resnetv2_50 botnet26t_256 lambda_resnet26t "
    "halonet26t eca_nfnet_l0 maxvit_pico_rw_256 twins_svt_small volo_d1_224 beit_base_patch16_224 "
    "inception_v3 xception41 tinynet_e fbnetc_100 lcnet_050 crossvit_tiny_240 convmixer_768_32 davit_tiny"
)
TORCHVISION = _words(
    "resnet18 resnext50_32x4d wide_resnet50_2 densenet121 mobilenet_v2 mobilenet_v3_small mnasnet0_5 "
    "shufflenet_v2_x0_5 squeezenet1_1 efficientnet_b0 regnet_y_400mf convnext_tiny swin_t swin_v2_t "
    "alexnet vgg11 googlenet"
)


class _Squares(nn.Module):
    """A network of torch alone."""

    def __init__(self, work: Callable[[nn.Module, Tensor], Tensor], **parts: Any) -> None:
        super().__init__()
        for name, part in parts.items():
            if isinstance(part, Tensor):
                part = nn.Parameter(part)
            setattr(self, name, part)
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self, x)


def _own(make: Callable[[int], nn.Module], shape: Callable[[int], tuple[int, ...]]) -> Build:
    def build(size: str) -> tuple[nn.Module, Inputs]:
        torch.manual_seed(0)
        width = 16 if size == "tiny" else 256
        return make(width), lambda batch: {"x": torch.randn(batch, *shape(width))}

    return build


def _fno(w: int) -> nn.Module:
    def work(m: Any, x: Tensor) -> Tensor:
        for k in range(3):
            spectrum = torch.fft.rfft(x)[..., :5]
            mixed = torch.einsum("bik,iok->bok", spectrum, torch.view_as_complex(m.weights[k]))
            x = F.gelu(torch.fft.irfft(mixed, n=x.shape[-1]) + m.skip[k](x))
        return x

    skip = nn.ModuleList(nn.Conv1d(w, w, 1) for _ in range(3))
    return _Squares(work, weights=torch.randn(3, w, w, 5, 2) / w, skip=skip)


def _s4d(w: int) -> nn.Module:
    def work(m: Any, x: Tensor) -> Tensor:
        step, length = m.log_dt.exp()[:, None], x.shape[-1]
        rate = -torch.exp(m.log_real) + 1j * m.imaginary
        mix = torch.view_as_complex(m.mix) * (torch.exp(rate * step) - 1) / rate
        kernel = (
            2
            * torch.einsum(
                "hn,hnl->hl", mix, torch.exp((rate * step)[..., None] * torch.arange(length))
            ).real
        )
        y = torch.fft.irfft(
            torch.fft.rfft(x, n=2 * length) * torch.fft.rfft(kernel.to(x.dtype), n=2 * length),
            n=2 * length,
        )[..., :length]
        return m.out(F.gelu(y + x * m.skip[:, None]).mT)

    return _Squares(
        work,
        log_dt=torch.rand(w) - 3,
        log_real=torch.zeros(w, 4),
        imaginary=torch.arange(4.0).repeat(w, 1) * 3,
        mix=torch.randn(w, 4, 2),
        skip=torch.randn(w),
        out=nn.Linear(w, w),
    )


def _masked_autoregressive(w: int) -> nn.Module:
    def work(m: Any, x: Tensor) -> Tensor:
        for layer, mask in ((m.a, m.first), (m.b, m.second)):
            x = torch.tanh(F.linear(x, layer.weight * mask, layer.bias))
        return x

    model = _Squares(work, a=nn.Linear(w, 2 * w), b=nn.Linear(2 * w, w))
    model.register_buffer("first", torch.tril(torch.ones(2 * w, w)))
    model.register_buffer("second", torch.tril(torch.ones(w, 2 * w)))
    return model


def _attention_graph(w: int) -> nn.Module:
    """GATv2 on a ring of nodes, as edges: each record is one graph."""

    def work(m: Any, x: Tensor) -> Tensor:
        nodes = x.shape[1]
        left = torch.arange(nodes).repeat(3)
        right = torch.cat([torch.arange(nodes).roll(k) for k in (0, 1, 2)])
        a, b = m.left(x), m.right(x)
        score = (F.leaky_relu(a[:, left] + b[:, right], 0.2) * m.attention).sum(-1, keepdim=True)
        weight = score.exp()
        total = torch.zeros(*x.shape[:2], 1, dtype=x.dtype).index_add(1, right, weight)
        made = torch.zeros_like(a).index_add(1, right, weight / total[:, right] * a[:, left])
        return m.head(F.elu(made + m.shift))

    return _Squares(
        work,
        left=nn.Linear(w, w),
        right=nn.Linear(w, w),
        attention=torch.randn(1, w) / 4,
        shift=torch.zeros(w),
        head=nn.Linear(w, w),
    )


def _weight_normed(w: int) -> nn.Module:
    from torch.nn.utils.parametrizations import weight_norm

    return nn.Sequential(
        weight_norm(nn.Conv1d(w, w, 3, padding=1), dim=2),
        nn.GELU(),
        weight_norm(nn.Conv1d(w, w, 3, padding=1)),
    )


class _Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        w = self.weight
        mean, var = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (w - mean) * torch.rsqrt(var + 1e-5), self.bias, 1, 1)


OWN: dict[str, Build] = {
    "FNO": _own(_fno, lambda w: (w, 32)),
    "S4D": _own(_s4d, lambda w: (w, 32)),
    "MAF": _own(_masked_autoregressive, lambda w: (w,)),
    "GATv2": _own(_attention_graph, lambda w: (12, w)),
    "weight norm convolution": _own(_weight_normed, lambda w: (w, 24)),
    "weight standardisation": _own(
        lambda w: nn.Sequential(
            _Standardised(3, w, 3), nn.GroupNorm(4, w), nn.ReLU(), _Standardised(w, w, 3)
        ),
        lambda w: (3, 16, 16),
    ),
    "LSTM": _own(
        lambda w: _Squares(lambda m, x: m.net(x)[0], net=nn.LSTM(w, w, 2, batch_first=True)),
        lambda w: (20, w),
    ),
    "GRU": _own(
        lambda w: _Squares(lambda m, x: m.net(x)[0], net=nn.GRU(w, w, batch_first=True)),
        lambda w: (20, w),
    ),
    "transformer encoder": _own(
        lambda w: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(w, 4, 2 * w, 0.0, batch_first=True),
            2,
            enable_nested_tensor=False,
        ),
        lambda w: (12, w),
    ),
    "sequence-first transformer": _own(
        lambda w: _Squares(
            lambda m, x: m.net(x.transpose(0, 1)).transpose(0, 1),
            net=nn.TransformerEncoder(
                nn.TransformerEncoderLayer(w, 4, 2 * w, 0.0), 2, enable_nested_tensor=False
            ),
        ),
        lambda w: (12, w),
    ),
    "perceptron": _own(
        lambda w: nn.Sequential(nn.Linear(w, 2 * w), nn.ReLU(), nn.Linear(2 * w, w)), lambda w: (w,)
    ),
}


def _diffusion(name: str, **options: Any) -> Build:
    def build(size: str) -> tuple[nn.Module, Inputs]:
        import diffusers

        w = 8 if size == "tiny" else 64
        torch.manual_seed(0)
        given = {
            "UNet2DModel": {
                "sample_size": 16,
                "in_channels": 3,
                "out_channels": 3,
                "layers_per_block": 1,
                "block_out_channels": (w, 2 * w),
                "norm_num_groups": 4,
                "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
                "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
                "attention_head_dim": 4,
            },
            "AutoencoderKL": {
                "block_out_channels": (w, w),
                "layers_per_block": 1,
                "norm_num_groups": 4,
                "down_block_types": ("DownEncoderBlock2D",) * 2,
                "up_block_types": ("UpDecoderBlock2D",) * 2,
            },
            "DiTTransformer2DModel": {
                "num_attention_heads": 2,
                "attention_head_dim": w,
                "in_channels": 4,
                "num_layers": 2,
                "sample_size": 8,
                "num_embeds_ada_norm": 10,
                "norm_num_groups": 4,
            },
        }[name]
        model = getattr(diffusers, name)(**given)
        if name == "AutoencoderKL":
            return model, lambda batch: {"sample": torch.randn(batch, 3, 16, 16)}
        if name.startswith("DiT"):
            return model, lambda batch: {
                "hidden_states": torch.randn(batch, 4, 8, 8),
                "timestep": torch.randint(0, 9, (batch,)),
                "class_labels": torch.randint(0, 9, (batch,)),
            }
        return model, lambda batch: {
            "sample": torch.randn(batch, 3, 16, 16),
            "timestep": torch.randint(0, 9, (batch,)),
        }

    return build


def _there(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _all() -> dict[str, Build]:
    found = dict(OWN)
    if _there("transformers"):
        names = {
            "causal": ("input_ids",),
            "masked": ("input_ids",),
            "pooled": ("input_ids",),
            "seq2seq": ("input_ids", "decoder_input_ids"),
        }
        for task, kinds in TEXT.items():
            for kind, name in kinds.items():
                found[name] = _hugging_face(kind, name, _tokens(*names[task]))
        found |= {name: _hugging_face(kind, name, _pixels) for kind, name in IMAGES.items()}
        found |= {name: _hugging_face(kind, name, _sound) for kind, name in AUDIO.items()}
        if _there("peft"):
            found |= {
                f"Llama, {name}": _adapter(kind, **how) for name, (kind, how) in ADAPTERS.items()
            }
    if _there("timm"):
        found |= {f"timm {name}": _images("timm", name) for name in TIMM}
    if _there("torchvision"):
        found |= {f"torchvision {name}": _images("torchvision", name) for name in TORCHVISION}
    if _there("diffusers"):
        found |= {
            f"diffusers {name}": _diffusion(name)
            for name in ("UNet2DModel", "AutoencoderKL", "DiTTransformer2DModel")
        }
    return found


FAMILIES: dict[str, Build] = _all()


def losses_of(output: Any) -> Tensor:
    """Some loss of each example, from all numbers of the first tensor that the model gives."""
    if not isinstance(output, Tensor):
        values = output.values() if hasattr(output, "values") else output
        output = next(
            t for t in values if isinstance(t, Tensor) and t.dim() > 1 and t.requires_grad
        )
    rows = output.flatten(1)
    rows = torch.view_as_real(rows).flatten(1) if rows.is_complex() else rows
    return (rows.float() if rows.dtype != torch.float64 else rows).sin().mean(
        1
    ) + 0.1 * rows.square().mean(1)
