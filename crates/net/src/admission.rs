//! Admission of connections that are not authenticated yet.
//!
//! [`half_open`] bounds how many there are, and [`scheduler`] how many of them are served at a time.

pub(crate) mod half_open;
pub(crate) mod scheduler;
