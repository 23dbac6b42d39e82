"""The web console at `/`: a chat, the caller's sessions, and plots of what they cost.

The page is plain files without a build. What it shows comes from the API that everybody has, and from
`/console/sessions`, which is the page's own and promises nothing to others.
"""
