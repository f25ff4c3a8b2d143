//! Which build this is.

use std::sync::LazyLock;

/// Returns what `--version` prints after the name: the version and the commit.
pub(crate) fn long() -> &'static str {
    static LONG: LazyLock<String> =
        LazyLock::new(|| format!("{}, commit: {}", short(), option_env!("KAS_COMMIT").unwrap_or("unknown")));
    &LONG
}

/// Returns the version alone, as it stands in a user agent.
pub(crate) const fn short() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
