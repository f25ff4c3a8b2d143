//! The configuration that agents are given.

pub mod parse;
