/**
 * slotpin's companion for Pi: says which session a request belongs to, and shows what slotpin answers.
 *
 * For models of a provider that is called "slotpin" or "slotpin-…"; nothing happens with others.
 */

import type { ExtensionAPI, ExtensionContext } from "@earendil-works/pi-coding-agent";

const NAME = "slotpin";
const REPEAT_MS = 60_000;
const STATUS_MS = 2_000;

interface Warning {
	cause: string;
	message: string;
	count: number;
}

export default function (pi: ExtensionAPI) {
	let inTurn = false;
	let slot: string | undefined; // of the turn that is under way
	let status: string | undefined; // what the status line shows
	let before: Warning[] | undefined; // what slotpin warned of before a summary; undefined: there was none
	const shown = new Map<string, number>(); // cause, and when it was last shown

	const show = (ctx: ExtensionContext, text: string | undefined) => {
		if (text !== status) ctx.ui.setStatus(NAME, text);
		status = text;
	};

	const warn = (ctx: ExtensionContext, cause: string, text: string) => {
		const now = Date.now();
		if (now - (shown.get(cause) ?? -REPEAT_MS) < REPEAT_MS) return;
		shown.set(cause, now);
		ctx.ui.notify(`slotpin: ${text}`, "warning");
	};

	pi.on("turn_start", () => {
		inTurn = true;
		before = undefined;
	});
	pi.on("turn_end", () => void (inTurn = false));
	pi.on("agent_end", () => void (inTurn = false));

	pi.on("before_provider_headers", async (event, ctx) => {
		const url = slotpinUrl(ctx);
		if (url === undefined) return;
		event.headers["X-Slotpin-Session"] = ctx.sessionManager.getSessionId();
		event.headers["X-Slotpin-Role"] = inTurn ? "main" : "compactor";
		if (inTurn) return;
		event.headers["X-Slotpin-On-Unsafe"] = "pass"; // Pi can't go on without a summary
		before ??= await warnings(url);
	});

	// Pi does not show an extension the answer to a summary: what slotpin warned of meanwhile is asked for.
	const summarised = async (ctx: ExtensionContext) => {
		const url = slotpinUrl(ctx);
		const known = before;
		before = undefined;
		if (url === undefined || known === undefined || !ctx.hasUI) return;
		for (const { cause, message, count } of await warnings(url)) {
			if (count > (known.find((each) => each.cause === cause)?.count ?? 0)) warn(ctx, cause, message);
		}
	};
	pi.on("session_compact", (_event, ctx) => summarised(ctx));
	pi.on("session_compact_failed", (_event, ctx) => summarised(ctx));
	pi.on("session_tree", (_event, ctx) => summarised(ctx));

	pi.on("after_provider_response", (event, ctx) => {
		slot = event.headers["x-slotpin-slot"];
		if (slot === undefined) show(ctx, undefined);
		const text = event.headers["x-slotpin-warning"];
		if (text !== undefined) warn(ctx, text.split(":", 1)[0], text);
	});

	pi.on("message_end", (event, ctx) => {
		if (event.message.role !== "assistant" || slot === undefined) return;
		const { input, cacheRead } = event.message.usage;
		const share = input + cacheRead > 0 ? `, ${Math.round((100 * cacheRead) / (input + cacheRead))}% re-used` : "";
		show(ctx, `slotpin: slot ${slot}${share}`);
		slot = undefined;
	});

	pi.on("model_select", (_event, ctx) => show(ctx, undefined));
}

/** Where slotpin listens, if the session's model is behind it. */
function slotpinUrl(ctx: ExtensionContext): string | undefined {
	const model = ctx.model;
	if (model === undefined || !/^slotpin(-|$)/.test(model.provider)) return undefined;
	return URL.parse(model.baseUrl)?.origin;
}

/** What slotpin has warned of within the last minute; nothing where something else listens. */
async function warnings(url: string): Promise<Warning[]> {
	try {
		const answer = await fetch(`${url}/slotpin/status`, { signal: AbortSignal.timeout(STATUS_MS) });
		return ((await answer.json()) as { warnings?: Warning[] }).warnings ?? [];
	} catch {
		return [];
	}
}
