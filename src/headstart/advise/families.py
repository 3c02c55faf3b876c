"""Well-known families of models, with the small drafts and public heads that go with them, by their names on the hub.

The table serves where nothing is on disk. It tells what is worth a look, and `headstart check` tells whether it works.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from headstart.advise.facts import SAFETENSORS, Facts

DRAFT_MODEL = "draft_model"
SMALLER = 1.5  # a draft is of use where the target is so many times as large, at least
LAYERS = 17  # of a model with a billion weights; eight times as many weights have twice as many


@dataclass(frozen=True)
class Known:
    """A draft or head that is on the hub."""

    id: str
    billions: float  # of weights, about; of a head, those that a forward reads
    kind: str = DRAFT_MODEL  # or a method that drafts with heads
    fits: str = ""  # a pattern for targets of the family that it was made for; empty: all of them

    @property
    def head(self) -> bool:
        return self.kind != DRAFT_MODEL

    @property
    def fetch(self) -> str:
        return f"hf download {self.id}"

    def facts(self) -> Facts:
        """As far as they are known without the files: 16 bits a weight."""
        count = round(self.billions * 1e9)
        return Facts(
            self.id,
            Path(self.id),
            SAFETENSORS,
            head=self.head,
            parameters=count,
            weight_bytes=2 * count,
            layers=1 if self.head else usual_layers(self.billions),
            dtype="BF16",
        )


@dataclass(frozen=True)
class Family:
    name: str
    pattern: str  # of a name, as `plain` gives it
    drafts: tuple[Known, ...] = ()
    note: str = ""  # what else to know


OWN_MTP = "has an MTP layer of its own (method mtp), where its files still hold it"
# The first pattern that is found in a name counts, so what is special comes before what is general.
FAMILIES = (
    Family(
        "Llama 4",
        r"llama-?4",
        (
            Known("lmsys/sglang-EAGLE3-Llama-4-Maverick-17B-128E-Instruct-v1", 0.8, "eagle3", "maverick"),
            Known("lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge", 0.8, "eagle3", "scout"),
        ),
    ),
    Family(
        "Llama 3",
        r"llama-?3|r1-distill-llama|deepseek-r1:(8b|70b)",
        (
            Known("meta-llama/Llama-3.2-1B-Instruct", 1.24),
            Known("meta-llama/Llama-3.2-3B-Instruct", 3.21),
            Known("RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3", 0.42, "eagle3", r"^llama-?3\.1.*8b"),
            Known("yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", 0.42, "eagle3", r"^llama-?3\.1.*8b"),
            Known("RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3", 1.4, "eagle3", r"^llama-?3\.3.*70b"),
            Known("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", 1.4, "eagle3", r"^llama-?3\.3.*70b"),
            Known("yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B", 0.42, "eagle3", r"r1.*8b"),
            Known("yuhuili/EAGLE-LLaMA3-Instruct-8B", 0.25, "eagle", r"llama-?3-8b|llama-?3:8b"),
            Known("yuhuili/EAGLE-LLaMA3-Instruct-70B", 0.99, "eagle", r"llama-?3-70b|llama-?3:70b"),
            Known("ibm-ai-platform/llama3-8b-accelerator", 1.6, "mlp_speculator", r"llama-?3(\.1)?[-:]8b"),
            Known("ibm-ai-platform/llama3-70b-accelerator", 4.2, "mlp_speculator", r"llama-?3(\.1)?[-:]70b"),
        ),
    ),
    Family(
        "Llama 2",
        r"llama-?2|vicuna|tinyllama|llama-68m|llama-160m|codellama",
        (
            Known("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1),
            Known("JackFram/llama-68m", 0.068),
            Known("yuhuili/EAGLE-llama2-chat-7B", 0.24, "eagle", r"llama-?2.*7b"),
            Known("yuhuili/EAGLE-llama2-chat-13B", 0.37, "eagle", r"llama-?2.*13b"),
            Known("yuhuili/EAGLE-llama2-chat-70B", 0.99, "eagle", r"llama-?2.*70b"),
            Known("yuhuili/EAGLE3-Vicuna1.3-13B", 0.6, "eagle3", r"vicuna.*13b"),
            Known("yuhuili/EAGLE-Vicuna-7B-v1.3", 0.24, "eagle", r"vicuna.*7b"),
            Known("FasterDecoding/medusa-vicuna-7b-v1.3", 0.7, "medusa", r"vicuna.*7b"),
        ),
    ),
    Family(
        "DeepSeek R1 on Qwen",
        r"r1-distill-qwen|deepseek-r1:(1\.5b|7b|14b|32b)",
        (Known("deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", 1.78),),
    ),
    Family(
        "DeepSeek V3",
        r"deepseek-(v3|r1)",
        (
            Known("jukofyork/DeepSeek-V3-DRAFT-0.6B-v3.0-GGUF", 0.59),
            Known("lmsys/DeepSeek-V3-NextN", 14.0, "mtp", "deepseek-v3"),
        ),
        OWN_MTP,
    ),
    Family(
        "Qwen2.5-Coder",
        r"qwen-?2\.5-?coder",
        (Known("Qwen/Qwen2.5-Coder-0.5B-Instruct", 0.49), Known("Qwen/Qwen2.5-Coder-1.5B-Instruct", 1.54)),
        "models from 7B on have more rows of padding than the small ones: vLLM wants use_heterogeneous_vocab",
    ),
    Family(
        "Qwen2.5",
        r"qwen-?2\.5|qwq",
        (Known("Qwen/Qwen2.5-0.5B-Instruct", 0.49), Known("Qwen/Qwen2.5-1.5B-Instruct", 1.54)),
        "models from 7B on have more rows of padding than the small ones: vLLM wants use_heterogeneous_vocab",
    ),
    Family(
        "Qwen3 with recurrent layers",
        r"qwen-?3-next|qwen-?3\.[5-9]",
        (),
        "has MTP layers of its own, which vLLM and SGLang run; Headstart runs no recurrent layers",
    ),
    Family(
        "Qwen3",
        r"qwen-?3",
        (
            Known("Qwen/Qwen3-0.6B", 0.6),
            Known("Qwen/Qwen3-1.7B", 1.7),
            Known("RedHatAI/Qwen3-8B-speculator.eagle3", 0.4, "eagle3", r"qwen-?3[-:]8b"),
            Known("AngelSlim/Qwen3-8B_eagle3", 0.4, "eagle3", r"qwen-?3[-:]8b"),
            Known("RedHatAI/Qwen3-14B-speculator.eagle3", 0.61, "eagle3", r"qwen-?3[-:]14b"),
            Known("AngelSlim/Qwen3-14B_eagle3", 0.6, "eagle3", r"qwen-?3[-:]14b"),
            Known("RedHatAI/Qwen3-32B-speculator.eagle3", 0.78, "eagle3", r"qwen-?3[-:]32b"),
            Known("AngelSlim/Qwen3-32B_eagle3", 0.7, "eagle3", r"qwen-?3[-:]32b"),
            Known("AngelSlim/Qwen3-4B_eagle3", 0.25, "eagle3", r"qwen-?3[-:]4b"),
            Known("AngelSlim/Qwen3-1.7B_eagle3", 0.15, "eagle3", r"qwen-?3[-:]1\.7b"),
            Known("AngelSlim/Qwen3-a3B_eagle3", 0.2, "eagle3", r"qwen-?3[-:]30b-a3b(?!.*2507)"),
            Known("lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex", 0.2, "eagle3", "30b-a3b-instruct-2507"),
            Known("lmsys/SGLang-EAGLE3-Qwen3-Coder-30B-A3B-Instruct-SpecForge", 0.2, "eagle3", "coder-30b-a3b"),
            Known("lmsys/Qwen3-235B-A22B-EAGLE3", 0.6, "eagle3", r"qwen-?3[-:]235b-a22b(?!.*2507)"),
        ),
    ),
    Family(
        "Qwen2",
        r"qwen-?2",
        (
            Known("Qwen/Qwen2-0.5B-Instruct", 0.49),
            Known("Qwen/Qwen2-1.5B-Instruct", 1.54),
            Known("yuhuili/EAGLE-Qwen2-7B-Instruct", 0.26, "eagle", "7b"),
            Known("yuhuili/EAGLE-Qwen2-72B-Instruct", 1.05, "eagle", "72b"),
        ),
    ),
    Family("Gemma 2", r"gemma-?2", (Known("google/gemma-2-2b-it", 2.61),)),
    Family("Gemma 3", r"gemma-?3(?!n)", (Known("google/gemma-3-270m-it", 0.27), Known("google/gemma-3-1b-it", 1.0))),
    Family("Gemma 4", r"gemma-?4", (Known("RedHatAI/gemma-4-31B-it-speculator.eagle3", 0.8, "eagle3", "31b"),)),
    Family(
        "Mistral Large 3",
        r"mistral-large-3",
        (Known("mistralai/Mistral-Large-3-675B-Instruct-2512-Eagle", 11.0, "eagle"),),
        "the head is in vLLM's form; Headstart does not read it",
    ),
    Family(
        "Mistral Small 3",
        r"mistral-small|devstral-small|magistral-small",
        (Known("alamios/Mistral-Small-3.1-DRAFT-0.5B", 0.5),),
    ),
    Family("Ministral 3", r"ministral-?3", (Known("mistralai/Ministral-3-3B-Instruct-2512", 3.8),)),
    Family(
        "Mistral",
        r"mistral-?(large|7b)|mistral-large|mistral:|mixtral|mistral-7b",
        (
            Known("mistralai/Mistral-7B-Instruct-v0.3", 7.25, DRAFT_MODEL, "large"),
            Known("yuhuili/EAGLE-mixtral-instruct-8x7B", 0.28, "eagle", "mixtral.*8x7b"),
        ),
        "the 7B is the smallest that is public with this vocabulary: ngram, suffix or a trained head cost less",
    ),
    Family("Phi 3", r"phi-?3", (Known("microsoft/Phi-3-mini-4k-instruct", 3.82),)),
    Family("Phi 4", r"phi-?4", (), "Phi-4 and Phi-4-mini have different vocabularies; no small draft is well known"),
    Family("GLM 4.5", r"glm-?4\.[5-9]|glm-?5", (), OWN_MTP),
    Family("MiMo", r"mimo", (), OWN_MTP),
    Family(
        "gpt-oss",
        r"gpt-?oss",
        (
            Known("RedHatAI/gpt-oss-20b-speculator.eagle3", 0.3, "eagle3", "20b"),
            Known("lmsys/EAGLE3-gpt-oss-120b-bf16", 0.3, "eagle3", "120b"),
            Known("nvidia/gpt-oss-120b-Eagle3-v3", 0.3, "eagle3", "120b"),
        ),
    ),
    Family(
        "SmolLM2",
        r"smollm-?2",
        (Known("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135), Known("HuggingFaceTB/SmolLM2-360M-Instruct", 0.362)),
        "the built-in model smollm2 is the smallest of them, with a head of its own",
    ),
    Family("OLMo 2", r"olmo-?2", (Known("allenai/OLMo-2-0425-1B-Instruct", 1.48),)),
    Family(
        "Granite code",
        r"granite.*code",
        (
            Known("ibm-granite/granite-3b-code-instruct-accelerator", 0.3, "mlp_speculator", "3b"),
            Known("ibm-granite/granite-8b-code-instruct-accelerator", 0.4, "mlp_speculator", "8b"),
            Known("ibm-granite/granite-20b-code-instruct-accelerator", 0.6, "mlp_speculator", "20b"),
        ),
    ),
    Family("Granite 3", r"granite-?3", (Known("ibm-granite/granite-3.1-1b-a400m-instruct", 1.33),)),
    Family("Falcon 3", r"falcon-?3", (Known("tiiuae/Falcon3-1B-Instruct", 1.67),)),
    Family("EXAONE 4", r"exaone-?4", (Known("LGAI-EXAONE/EXAONE-4.0-1.2B", 1.28),)),
    Family("EXAONE 3.5", r"exaone-?3\.5", (Known("LGAI-EXAONE/EXAONE-3.5-2.4B-Instruct", 2.41),)),
    Family("Pythia", r"pythia", (Known("EleutherAI/pythia-70m", 0.07), Known("EleutherAI/pythia-160m", 0.16))),
    Family("OPT", r"\bopt-", (Known("facebook/opt-125m", 0.125),)),
    Family("GPT-2", r"gpt-?2", (Known("distilbert/distilgpt2", 0.082), Known("openai-community/gpt2", 0.124))),
    Family("StarCoder", r"starcoder(?!-?2)", (Known("bigcode/tiny_starcoder_py", 0.164),)),
)  # fmt: skip


def plain(name: str) -> str:
    """The last part of a name, in small letters and with one kind of dash; Ollama's tags stay."""
    last = name.replace("\\", "/").rstrip("/").split("/")[-1].lower().removeprefix("ollama:").removesuffix(".gguf")
    return re.sub(r"^(meta|mistralai|google)-", "", re.sub(r"[_ ]+", "-", last))


def family_of(*names: str) -> Family | None:
    """By whatever the model is called, the first name that tells something."""
    for name in names:
        if found := next((family for family in FAMILIES if re.search(family.pattern, plain(name))), None):
            return found
    return None


def billions_of(name: str) -> float | None:
    """Weights, as names tell them: Llama-3.3-70B, Qwen3-235B-A22B, Mixtral-8x7B, SmolLM2-135M."""
    if match := re.search(r"(?<![\d.a-z])(?:(\d+)x)?(\d+(?:\.\d+)?)([bm])(?![a-z0-9])", plain(name)):
        count, size, unit = match.groups()
        return int(count or 1) * float(size) / (1 if unit == "b" else 1000)
    return None


def well_known(*names: str, billions: float | None = None) -> list[Known]:
    """Drafts and heads for a target with these names, heads first; none that is as large as the target."""
    if (family := family_of(*names)) is None:
        return []
    size = billions or next((size for name in names if (size := billions_of(name))), None)
    told = [plain(name) for name in names]
    fitting = [known for known in family.drafts if not known.fits or any(re.search(known.fits, t) for t in told)]
    return sorted(
        (k for k in fitting if plain(k.id) not in told and (size is None or k.billions * SMALLER <= size)),
        key=lambda k: (not k.head, k.billions),
    )


def stand_in(name: str) -> Facts | None:
    """A target that is not on disk, as far as its name tells; None where it does not tell its size."""
    if (billions := billions_of(name)) is None:
        return None
    count = round(billions * 1e9)
    layers = usual_layers(billions)
    return Facts(name, Path(name), SAFETENSORS, parameters=count, weight_bytes=2 * count, layers=layers, dtype="BF16")


def usual_layers(billions: float) -> int:
    """Of dense models with so many weights, about."""
    return max(4, round(LAYERS * billions ** (1 / 3)))


def every_id() -> Iterable[str]:
    return (known.id for family in FAMILIES for known in family.drafts)
