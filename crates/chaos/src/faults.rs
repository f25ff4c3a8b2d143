//! Faults that the kernel or a library makes: packets, one process's clock, its resources.

pub(crate) mod clock;
pub(crate) mod packets;
pub(crate) mod resources;
