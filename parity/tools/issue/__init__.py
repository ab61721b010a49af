"""A bug report for upstream: Markdown with numbers, a stand-alone script or how to replay the case, and versions."""
