//! The service that agentk implements itself when it is started for a benchmark, as in every test.

use anyhow::{Context as _, Result, ensure};
use bytes::Bytes;
use grpc::Code;
use prost::Message as _;
use proto::kas::bench::v1::{Payload, UploadResponse};

use crate::{
    caller::{Caller, answer, frame},
    link::{Next, Stream},
};

/// Returns the message of the request.
pub const ECHO: &str = "/kas.bench.v1.Bench/Echo";
/// Counts the messages of the request.
pub const UPLOAD: &str = "/kas.bench.v1.Bench/Upload";
/// Returns as many messages as requested.
pub const DOWNLOAD: &str = "/kas.bench.v1.Bench/Download";
/// Returns one message, and then nothing until the caller cancels.
pub const HOLD: &str = "/kas.bench.v1.Bench/Hold";

/// Returns an encoded message with this data.
pub fn payload(data: impl Into<Bytes>) -> Vec<u8> {
    Payload { data: data.into() }.encode_to_vec()
}

/// Sends data to an agent and checks that it returns the same.
///
/// # Errors
/// The status, unless it is OK; and when something else comes back.
pub async fn echo(caller: &Caller, agent: i64, data: impl Into<Bytes>) -> Result<()> {
    let message = payload(data);
    let got = caller.call(caller.to_agent(agent, ECHO), &[&message]).await?;
    ensure!(got.status.code() == Code::Ok, "{}", got.status);
    ensure!(got.messages == [message], "the echo is not what was sent: {} messages", got.messages.len());
    Ok(())
}

/// Opens a stream through an agent that stays open, and waits for its first message.
///
/// # Errors
/// When the stream ends before.
pub async fn hold(caller: &Caller, agent: i64) -> Result<Stream> {
    let mut stream = caller.open(caller.to_agent(agent, HOLD)).await?;
    stream.send(frame(b"")).await.ok().context("sent")?;
    stream.half_close().ok().context("sent")?;
    let first = stream.next().await;
    ensure!(matches!(first, Next::Message(_)), "{first:?}");
    Ok(stream)
}

/// Opens an [`UPLOAD`] through an agent and sends its first message.
///
/// # Errors
/// When the stream ends before.
pub async fn upload(caller: &Caller, agent: i64, first: &'static str) -> Result<Stream> {
    let mut stream = caller.open(caller.to_agent(agent, UPLOAD)).await?;
    stream.send(frame(&payload(first))).await.ok().context("sent")?;
    Ok(stream)
}

/// Ends an [`upload`], and returns how many messages the agent has counted.
///
/// # Errors
/// The status, unless it is OK.
pub async fn uploaded(stream: &mut Stream) -> Result<u64> {
    stream.half_close().ok().context("sent")?;
    let total: UploadResponse = answer(stream).await?.one()?;
    Ok(total.messages)
}
