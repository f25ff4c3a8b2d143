//! The stream of a replica of this project: requests are envelopes.

use std::{
    pin::Pin,
    task::{Context, Poll, ready},
};

use bytes::BytesMut;
use http_body::Body as _;
use tunnel::{frame, kas_end::Job};

use super::{Next, RequestStream};

/// Requests as envelopes. The first of each is `request_info`.
#[derive(Debug)]
pub struct Envelopes {
    /// Taken by the request.
    body: Option<grpc::Body>,
    /// What was read so far.
    read: BytesMut,
}

impl RequestStream for Envelopes {
    fn new(body: grpc::Body) -> Self {
        Self { body: Some(body), read: BytesMut::new() }
    }

    fn poll_request(&mut self, cx: &mut Context<'_>) -> Poll<Next> {
        loop {
            match first_envelope(&self.read) {
                Ok(Some(len)) => {
                    let Some(body) = self.body.take() else { return Poll::Ready(Next::Broken) };
                    let mut ahead = std::mem::take(&mut self.read);
                    let request_info = ahead.split_to(len).freeze();
                    return Poll::Ready(Next::Request(Job::spliced(request_info, ahead.freeze(), body)));
                }
                Ok(None) => {}
                Err(why) => return Poll::Ready(Next::Malformed(why)),
            }
            let Some(body) = &mut self.body else { return Poll::Ready(Next::Broken) };
            match ready!(Pin::new(&mut *body).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        self.read.extend_from_slice(&data);
                    }
                }
                Some(Err(_)) | None if self.read.is_empty() && body.is_end_stream() => {
                    return Poll::Ready(Next::HalfClose);
                }
                Some(Err(_)) | None => return Poll::Ready(Next::Broken),
            }
        }
    }
}

/// Returns the length of the first envelope once it is complete.
fn first_envelope(bytes: &[u8]) -> Result<Option<usize>, &'static str> {
    let Some((prefix, rest)) = bytes.split_at_checked(grpc::PREFIX_LEN) else { return Ok(None) };
    let len = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
    if prefix[0] != 0 || len > frame::MAX_CONTROL + 16 {
        return Err("the first envelope is compressed or too large");
    }
    if rest.first().is_some_and(|tag| *tag != (frame::response::REQUEST_INFO as u8) << 3 | 2) {
        return Err("the first envelope is no request_info");
    }
    Ok((rest.len() >= len).then_some(grpc::PREFIX_LEN + len))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_envelope_is_found_at_every_split() {
        let mut bytes = BytesMut::new();
        frame::put_control(frame::response::REQUEST_INFO, b"info", &mut bytes);
        let len = bytes.len();
        frame::put_message_head(frame::response::MESSAGE, 3, &mut bytes);
        for end in 0..bytes.len() {
            let expected = (end >= len).then_some(len);
            assert_eq!(first_envelope(&bytes[..end]), Ok(expected), "{end}");
        }
        assert!(first_envelope(&bytes[len..]).is_err(), "a message cannot come first");
        assert!(first_envelope(&[1, 0, 0, 0, 1]).is_err() && first_envelope(&[0, 0xff, 0, 0, 0]).is_err());
    }
}
