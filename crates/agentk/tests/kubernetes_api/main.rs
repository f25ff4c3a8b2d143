//! `MakeRequest` against API servers that a test plays, and against the real one.

mod played;
mod real;
mod support;
mod tunnelled;
