//! Which build this is.

/// The release.
pub const VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));
/// The commit it was built from, shortened; `unknown` outside a checkout.
pub const COMMIT: &str = env!("KAS_BUILD_COMMIT");
/// What `--version` prints after the program's name.
pub const LONG: &str = concat!("v", env!("CARGO_PKG_VERSION"), ", commit: ", env!("KAS_BUILD_COMMIT"));
