//! The version of this build.

/// The release.
pub const VERSION: &str = concat!("v", env!("CARGO_PKG_VERSION"));
/// The abbreviated commit; `unknown` outside a checkout.
pub const COMMIT: &str = env!("KAS_BUILD_COMMIT");
/// What `--version` prints after the program's name.
pub const LONG: &str = concat!("v", env!("CARGO_PKG_VERSION"), ", commit: ", env!("KAS_BUILD_COMMIT"));
