//! `MakeRequest` against API servers that a test plays, and against the real one.

mod real;
mod scripted;
mod support;
mod tunnelled;
