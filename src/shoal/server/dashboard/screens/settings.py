"""The settings in force, for admins."""

from __future__ import annotations

from fastapi import APIRouter, Request

from shoal.server.dashboard.pages import add_screen
from shoal.server.state import Server, SettingInForce

router = APIRouter()


async def load(server: Server, request: Request) -> dict[str, object]:
    text = request.query_params.get("q", "")[:100].strip()
    changed = "changed" in request.query_params
    sections: dict[str, list[tuple[SettingInForce, str]]] = {}
    for each in server.settings():
        if text.lower() in each.key and not (changed and each.source == "default"):
            section, mark, _ = each.key.partition(".")
            sections.setdefault(section if mark else "", []).append((each, _shown(each.value)))
    return {"sections": sections, "text": text, "changed": changed}


def _shown(value: object) -> str:
    """A value as `shoal config` prints it."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}={each}" for name, each in value.items())
    return str(value)


add_screen(router, "/ui/settings", "settings", load, needs="admin")
