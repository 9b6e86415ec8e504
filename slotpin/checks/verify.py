"""`slotpin verify`: a conversation through slotpin, one without it, and the server's own counters for both."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import asdict, dataclass

from slotpin.checks.client import NoAnswerError, Server, key_for_requests
from slotpin.checks.conversation import SIDE, Run, Turn, write_script
from slotpin.checks.cost import LEAST_TOKENS
from slotpin.checks.doctor import slotpin_status
from slotpin.checks.look import Props, Trouble, read_models, read_props, read_slots
from slotpin.config import Listen, Settings
from slotpin.errors import UserError
from slotpin.observe import log as logs
from slotpin.pinning.endpoints import same_endpoint, server_root
from slotpin.pinning.reasons import Reason, explain
from slotpin.proxy.app import Proxy
from slotpin.proxy.questions import Questions

# Template, answers and the follow-up's question, over the text itself.
MARGIN = 200
# What the ends of prompts may differ by without being a loss: a template's generation prompt, a dropped reasoning.
TOLERATED = 0.1

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Result:
    """`direct` is empty where the run without slotpin was left out."""

    through: list[Turn]
    direct: list[Turn]

    @property
    def kept(self) -> bool:
        """Main kept its cache: follow-up and repetition re-used what the turn before each had left."""
        return kept(self.through)

    def as_json(self) -> dict[str, object]:
        return {
            "kept": self.kept,
            "verdict": verdict(self),
            "throughSlotpin": [_turn_json(turn) for turn in self.through],
            "direct": [_turn_json(turn) for turn in self.direct],
        }


def _turn_json(turn: Turn) -> dict[str, object]:
    names = {"prompt_ms": "promptMs"}
    return {names.get(name, name): value for name, value in asdict(turn).items()}


async def verify(settings: Settings, tokens: int, *, compare: bool, say: Say) -> Result:
    """Raises UserError when it can't be run."""
    with Questions() as http:
        try:
            return await _verify(http, settings, tokens, compare, say)
        except NoAnswerError as error:
            raise UserError(f"{server_root(settings.main.base_url)}: {error}; see slotpin doctor") from None


async def _verify(http: Questions, settings: Settings, tokens: int, compare: bool, say: Say) -> Result:
    if not same_endpoint(settings.main.base_url, settings.compactor.base_url):
        raise UserError("main and side requests have servers of their own: nothing is pinned, so nothing to verify")
    key = settings.compactor.api_key.get_secret_value()
    server = Server(http, server_root(settings.main.base_url), key)
    await _check_room(server, tokens)
    models = await read_models(server)
    model = models[0].id if models else None
    async with _entry(http, settings, say) as url:
        script = await write_script(server, tokens)
        entry = Server(http, url, key_for_requests(settings))
        run = Run(entry, server, model, lambda line: say(f"through slotpin: {line}"))
        through = await run.hold(script)
    direct: list[Turn] = []
    if compare:
        script = await write_script(server, tokens)
        direct = await Run(server, server, model, lambda line: say(f"without slotpin: {line}")).hold(script)
    return Result(through, direct)


async def _check_room(server: Server, tokens: int) -> None:
    """Nothing is sent that can't be answered. Raises UserError."""
    props = await read_props(server)
    if isinstance(props, Trouble):
        raise UserError(f"{props.text}; see slotpin doctor")
    if props.role == "router":
        raise UserError(f"{server.root} is in router mode, where slots can't be verified; see slotpin doctor")
    if props.is_sleeping:
        raise UserError(f"{server.root} sleeps; wake it with a request, then try again")
    slots = await read_slots(server)
    if isinstance(slots, Trouble):
        raise UserError(f"{slots.text}; see slotpin doctor")
    if len(slots) < 2:
        raise UserError(f"{server.root} has {len(slots)} slot, so nothing can be pinned; see slotpin doctor")
    n_ctx = min(_contexts(props, [slot.n_ctx for slot in slots]), default=None)
    # In a unified pool the side request has to find room beside the conversation.
    needed = tokens + 2 * tokens // 3 + 2 * MARGIN
    if n_ctx is not None and needed > n_ctx:
        fitting = (n_ctx - 2 * MARGIN) * 3 // 5
        advice = f"try --tokens {fitting}" if fitting >= LEAST_TOKENS else "start it with a larger --ctx-size"
        raise UserError(f"--tokens {tokens}: that takes {needed} tokens of context, a slot has {n_ctx}; {advice}")


def _contexts(props: Props, of_slots: Sequence[int | None]) -> list[int]:
    return [n_ctx for n_ctx in (props.default_generation_settings.n_ctx, *of_slots) if n_ctx]


@contextlib.asynccontextmanager
async def _entry(http: Questions, settings: Settings, say: Say) -> AsyncIterator[str]:
    """The URL of a slotpin with these settings: the one that runs, else one of our own, for this run alone."""
    url = settings.listen.url
    try:
        status = await slotpin_status(http, settings.listen) if settings.listen.port else None
    except NoAnswerError:
        status = None
    # Beside a slotpin that runs there must be no second one: each would know nothing of the other's requests.
    if status is not None and same_endpoint(status.endpoints.main, settings.main.base_url):
        _check_mode(status.mode, f"the slotpin on {url} runs with enabled: false")
        say(f"using the slotpin that runs on {url}")
        yield url
        return
    _check_mode(settings.llama_cpp_slots.enabled, "llamaCppSlots.enabled is false")
    say("no slotpin runs in front of this server: starting one for this run")
    logs.configure("auto", "error")
    proxy = Proxy(settings.model_copy(update={"listen": Listen(port=0, api_keys=settings.listen.api_keys)}), logs.get())
    await proxy.start()
    try:
        yield proxy.url
    finally:
        await proxy.stop()


def _check_mode(mode: bool | str, what: str) -> None:
    if mode is False:
        raise UserError(f"{what}, so nothing is pinned; use --enabled auto")


# --- what it means --------------------------------------------------------------------------------------------------


def kept(turns: Sequence[Turn]) -> bool:
    main, _, follow_up, again = turns
    return _keeps(main, follow_up) and _keeps(follow_up, again)


def _keeps(before: Turn, after: Turn) -> bool:
    return after.reused >= (1 - TOLERATED) * before.prompt


def verdict(result: Result) -> str:
    """A few sentences."""
    main, _, follow_up, again = result.through
    lost = follow_up if not _keeps(main, follow_up) else again
    if result.kept:
        first = (
            f"Main kept its cache: of the follow-up's {follow_up.prompt} prompt tokens {follow_up.reused} were re-used "
            f"and {follow_up.evaluated} evaluated."
        )
    else:
        first = (
            f"Main lost its cache: of the {lost.name}'s {lost.prompt} prompt tokens {lost.reused} were re-used and "
            f"{lost.evaluated} evaluated; see slotpin doctor."
        )
    stopped = any(turn.reason == Reason.PINNING_STOPPED for turn in result.through)
    why = f"slotpin does not pin here: {explain(Reason.PINNING_STOPPED)}." if stopped else ""
    return " ".join(filter(None, [first, _slots(result.through), why, _comparison(follow_up, result.direct)]))


def _slots(turns: Sequence[Turn]) -> str:
    """Where the turns ran, and whether slotpin had sent them there."""
    if any(turn.slot is None for turn in turns):
        return "Other requests ran meanwhile, so it is not known which slot each turn had."
    main = sorted({turn.slot for turn in turns if turn.name != SIDE and turn.slot is not None})
    side = next(turn.slot for turn in turns if turn.name == SIDE)
    where = f"Main ran on slot{'s' * (len(main) > 1)} {' and '.join(map(str, main))}, the {SIDE} on slot {side}"
    unpinned = sorted({turn.reason or "unknown" for turn in turns if turn.pinned is None})
    if unpinned:
        return f"{where}, not all of it pinned ({', '.join(unpinned)})."
    if any(turn.pinned != turn.slot for turn in turns):
        return f"{where}, which is not where slotpin had sent them: does the server ignore id_slot?"
    return f"{where}, as slotpin had pinned them."


def _comparison(follow_up: Turn, direct: Sequence[Turn]) -> str:
    if not direct:
        return ""
    without = direct[2].evaluated
    if without > 2 * follow_up.evaluated:
        return f"Without slotpin the follow-up evaluated {without}."
    if follow_up.evaluated > 2 * without:
        return f"Without slotpin the follow-up evaluated only {without}: that must not be; see slotpin doctor."
    return f"Without slotpin it evaluated {without}, about as much: {_why_no_more(direct)}."


def _why_no_more(direct: Sequence[Turn]) -> str:
    """What kept the conversation where slotpin did not."""
    main, side, follow_up, _ = direct
    if None in (main.slot, side.slot, follow_up.slot):
        return "nothing was lost this time"
    if side.slot == main.slot == follow_up.slot:
        return (
            "the compaction took its slot, and llama-server brought it back from its prompt cache in host memory "
            "(--cache-ram). slotpin makes the difference where that is off or full; to see it, start the server with "
            'slotpin up -- --cache-ram 0 (make run ARGS="-- --cache-ram 0")'
        )
    return "llama-server happened to choose another slot for the compaction; with fewer free ones it can't"


def lines(result: Result) -> list[str]:
    """The table for people, then the verdict."""
    table = [f"{'':<22}{'slot':>6}{'evaluated':>12}{'re-used':>10}{'prompt ms':>12}", "through slotpin"]
    table += map(_row, result.through)
    if result.direct:
        table += ["without slotpin (other text, so that nothing is shared)", *map(_row, result.direct)]
    return [*table, "", verdict(result)]


def _row(turn: Turn) -> str:
    slot = "?" if turn.slot is None else str(turn.slot)
    return f"  {turn.name:<20}{slot:>6}{turn.evaluated:>12}{turn.reused:>10}{turn.prompt_ms:>12.1f}"
