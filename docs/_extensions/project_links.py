"""Links from every page to the repository and to its issues, where the environment says where these are."""

from __future__ import annotations

from collections.abc import Mapping

#: Variable of the environment, name of the link, and its icon of Font Awesome.
LINKS = (
    ("BAYESKIT_REPOSITORY_URL", "Repository", "fa-solid fa-code-branch"),
    ("BAYESKIT_ISSUES_URL", "Issues", "fa-solid fa-circle-exclamation"),
)


def icon_links(environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Return the theme's icons for the links whose variable is set, in the order of ``LINKS``."""
    return [
        {"name": name, "url": environment[variable], "icon": icon}
        for variable, name, icon in LINKS
        if environment.get(variable)
    ]
