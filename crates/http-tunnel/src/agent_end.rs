//! The agent's end: receives a request, and sends its response.

mod head;
mod request;
mod response;

pub use self::{
    request::{RequestStream, read_request},
    response::{LARGE_CHUNK, ResponseEncoder},
};
pub use crate::MAX_CHUNK;
