"""What Pi's files should say about a slotpin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slotpin.pi.json_edit import MISSING, Document, find
from slotpin.pi.served import Served

PROVIDER = "slotpin"
PROVIDER_PATH = ("providers", PROVIDER)
NO_KEY = "none"
# Pi's own (its core/settings-defaults.ts): right for a context that is large against them.
_RESERVE, _KEEP, _MAX_TOKENS = 16384, 20000, 16384


def provider(url: str, api_key: str, models: Sequence[Served]) -> dict[str, Any]:
    """The entry of models.json."""
    return {
        "baseUrl": f"{url}/v1",
        "api": "openai-completions",
        "apiKey": api_key,
        # All but the last are what Pi's own llama.cpp provider uses.
        "compat": {
            "supportsStore": False,
            "supportsReasoningEffort": False,
            "supportsStrictMode": False,
            "maxTokensField": "max_tokens",
            "sendSessionAffinityHeaders": True,
        },
        "models": [_model(served) for served in models],
    }


def _model(served: Served) -> dict[str, Any]:
    model: dict[str, Any] = {"id": served.model}
    if served.thinks:
        model["reasoning"] = True
        model["thinkingLevelMap"] = {"minimal": None, "low": None, "medium": "medium", "high": None}
        model["compat"] = {"thinkingFormat": "qwen-chat-template"}
    if served.sees:
        model["input"] = ["text", "image"]
    return model | {"contextWindow": served.context, "maxTokens": min(_MAX_TOKENS, served.context // 4)}


def merged(theirs: Any, ours: dict[str, Any]) -> dict[str, Any]:
    """The user's entry for slotpin, if there is one, with what it lacks, and with where and how large slotpin is."""
    if not isinstance(theirs, dict):
        return ours
    known = theirs.get("models")
    models = {model.get("id"): model for model in known if isinstance(model, dict)} if isinstance(known, list) else {}
    for model in ours["models"]:
        old = models.get(model["id"], {})
        models[model["id"]] = (
            model | old | {"contextWindow": _smaller(old.get("contextWindow"), model["contextWindow"])}
        )
    compat = theirs.get("compat") if isinstance(theirs.get("compat"), dict) else {}
    key = ours["apiKey"] if ours["apiKey"] != NO_KEY else theirs.get("apiKey", NO_KEY)
    return (
        ours
        | theirs
        | {"baseUrl": ours["baseUrl"], "apiKey": key, "compat": ours["compat"] | compat, "models": [*models.values()]}
    )


def _smaller(theirs: object, ours: int) -> float:
    # Who gives Pi less than the slot has may mean it.
    return theirs if isinstance(theirs, int | float) and 0 < theirs < ours else ours


def compaction(served: Served) -> dict[str, int]:
    """The settings that a context of this size needs; none where Pi's own do.

    Pi compacts when fewer than `reserveTokens` are free, and keeps `keepRecentTokens`. A quarter each leaves half for
    what is between: the system prompt, the summary, and room to go on in.
    """
    quarter = served.context // 4
    wanted = {"reserveTokens": (quarter, _RESERVE), "keepRecentTokens": (quarter, _KEEP)}
    return {name: ours for name, (ours, pis) in wanted.items() if ours < pis}


def compaction_parts(settings: Document, models: Sequence[Served]) -> list[tuple[list[str], int]]:
    """Paths and values for settings.json, without those that the user has set, for this model or for all."""
    parts = []
    for served in models:
        for name, value in compaction(served).items():
            path = ["compaction", "modelOverrides", f"{PROVIDER}/{served.model}", name]
            if find(settings, ("compaction", name)) is MISSING and find(settings, path) is MISSING:
                parts.append((path, value))
    return parts
