//! The limits of published values. They are small because everything is gossiped to every member.

use std::{collections::BTreeMap, sync::Arc};

/// Keys per process.
pub const MAX_KEYS: usize = 16;
/// The longest key, in bytes.
pub const MAX_KEY: usize = 16;
/// The longest value, in bytes. With chitchat 0.13, a value above 65 KB would silently block its node for
/// good.
pub const MAX_VALUE: usize = 4_096;

pub(crate) type Values = BTreeMap<Arc<str>, Arc<str>>;

/// Why a value was not published. The earlier value stays. Always the caller's fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PublishError {
    /// The key is empty, longer than 16 bytes, or not printable ASCII without spaces.
    #[error("the key is not 1 to {MAX_KEY} printable ASCII bytes")]
    Key,
    /// The value is longer than 4 KiB, or not printable ASCII.
    #[error("the value is not at most {MAX_VALUE} printable ASCII bytes")]
    Value,
    /// There are 16 other keys already, and keys cannot be removed.
    #[error("there are {MAX_KEYS} keys already")]
    Full,
}

/// Checks that key and value can be published. Only ASCII, because chitchat panics on some other keys.
pub(crate) fn is_fit(key: &str, value: &str) -> Result<(), PublishError> {
    if key.is_empty() || key.len() > MAX_KEY || !key.bytes().all(|b| b.is_ascii_graphic()) {
        return Err(PublishError::Key);
    }
    if value.len() > MAX_VALUE || !value.bytes().all(|b| (0x20..0x7f).contains(&b)) {
        return Err(PublishError::Value);
    }
    Ok(())
}
