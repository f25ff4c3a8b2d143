//! What kas depends on, or what is between it and others, and how it can fail.

pub(crate) mod certificates;
pub(crate) mod dns;
pub(crate) mod outside;
pub(crate) mod sentinel;
pub(crate) mod wire;
