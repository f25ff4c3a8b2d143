//! Messages of HTTP/1.1 as bytes, for tests that compare messages or play one of both sides: unlike a
//! library, this neither adds nor normalises anything.

use anyhow::{Context as _, Result, bail, ensure};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};

/// The longest head that is read, in bytes.
const MAX_HEAD: usize = 256 * 1024;

/// The head of a message.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Head {
    /// The first line, without its end.
    pub line: String,
    /// The fields in their order, names in lower case, values without outer white space.
    pub fields: Vec<(String, String)>,
}

/// How the end of a body is found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// After so many bytes.
    Length(u64),
    /// By the last chunk.
    Chunked,
    /// By the end of the connection.
    Close,
}

/// A body.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Body {
    /// What has come.
    pub bytes: Vec<u8>,
    /// Whether it ended as it was announced.
    pub complete: bool,
}

impl Head {
    /// Returns the first value of a field, by its name in lower case.
    pub fn get(&self, name: &str) -> Option<&str> {
        self.fields.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Returns the elements of all fields of a name, in lower case.
    pub fn tokens(&self, name: &str) -> Vec<String> {
        let values = self.fields.iter().filter(|(key, _)| key == name);
        let tokens = values.flat_map(|(_, value)| value.split(','));
        tokens.map(|token| token.trim().to_ascii_lowercase()).filter(|token| !token.is_empty()).collect()
    }

    /// Returns the status of a response.
    ///
    /// # Errors
    /// If the first line is not one of a response.
    pub fn status(&self) -> Result<u16> {
        let status = self.line.strip_prefix("HTTP/1.").and_then(|rest| rest.get(2..5)?.parse().ok());
        status.with_context(|| format!("not the head of a response: {:?}", self.line))
    }

    /// Returns how the body of a request ends.
    ///
    /// # Errors
    /// If it cannot be told.
    pub fn framing_of_request(&self) -> Result<Framing> {
        Ok(self.framing()?.unwrap_or(Framing::Length(0)))
    }

    /// Returns how the body of a response to a request of this method ends.
    ///
    /// # Errors
    /// If it cannot be told.
    pub fn framing_of_response(&self, method: &str) -> Result<Framing> {
        let status = self.status()?;
        if method == "HEAD" || status == 204 || status == 304 || status < 200 {
            return Ok(Framing::Length(0));
        }
        Ok(self.framing()?.unwrap_or(Framing::Close))
    }

    fn framing(&self) -> Result<Option<Framing>> {
        let codings = self.tokens("transfer-encoding");
        let lengths = self.tokens("content-length");
        match (&codings[..], &lengths[..]) {
            ([], []) => Ok(None),
            ([], [length]) => Ok(Some(Framing::Length(length.parse()?))),
            ([coding], []) if coding == "chunked" => Ok(Some(Framing::Chunked)),
            _ => bail!("the length is not clear: Transfer-Encoding {codings:?}, Content-Length {lengths:?}"),
        }
    }
}

/// Reads a line without its end. `None`: the stream ended before it began.
async fn line(stream: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<String>> {
    let mut line = Vec::new();
    let mut limited = stream.take(MAX_HEAD as u64);
    limited.read_until(b'\n', &mut line).await?;
    if line.is_empty() {
        return Ok(None);
    }
    ensure!(line.ends_with(b"\r\n"), "a line without an end: {}", line.escape_ascii());
    line.truncate(line.len() - 2);
    Ok(Some(String::from_utf8_lossy(&line).into_owned()))
}

/// Reads a head. `None`: the stream ended before it began.
///
/// # Errors
/// If it is malformed, or the stream ends or fails within it.
pub async fn read_head(stream: &mut (impl AsyncBufRead + Unpin)) -> Result<Option<Head>> {
    let Some(first) = line(stream).await? else { return Ok(None) };
    let mut head = Head { line: first, fields: Vec::new() };
    loop {
        let field = line(stream).await?.context("the stream ended within a head")?;
        if field.is_empty() {
            return Ok(Some(head));
        }
        let (name, value) = field.split_once(':').with_context(|| format!("not a field: {field:?}"))?;
        head.fields.push((name.to_ascii_lowercase(), value.trim_matches([' ', '\t']).to_owned()));
    }
}

/// Reads a body. Trailers are read and dropped. A body that is cut is returned as far as it came.
pub async fn read_body(stream: &mut (impl AsyncBufRead + Unpin), framing: Framing) -> Body {
    let mut body = Body::default();
    let mut pieces = Pieces::new(framing);
    loop {
        match pieces.next(stream, usize::MAX).await {
            Ok(Some(piece)) => body.bytes.extend_from_slice(&piece),
            Ok(None) => return Body { complete: true, ..body },
            Err(_) => return body,
        }
    }
}

/// What is left of a body that is read piece by piece, as it comes.
#[derive(Clone, Copy, Debug)]
pub struct Pieces(Rest);

#[derive(Clone, Copy, Debug)]
enum Rest {
    Length(u64),
    /// The size of a chunk comes next.
    Size,
    /// So much of a chunk, and its end.
    Chunk(u64),
    Close,
    Nothing,
}

impl Pieces {
    /// Nothing is read yet.
    pub fn new(framing: Framing) -> Self {
        Self(match framing {
            Framing::Length(length) => Rest::Length(length),
            Framing::Chunked => Rest::Size,
            Framing::Close => Rest::Close,
        })
    }

    /// Waits for the next piece, of at most `most` bytes. `None`: the body is complete. Trailers are dropped.
    ///
    /// # Errors
    /// If it is cut or malformed.
    pub async fn next(
        &mut self,
        stream: &mut (impl AsyncBufRead + Unpin),
        most: usize,
    ) -> Result<Option<Vec<u8>>> {
        loop {
            match self.0 {
                Rest::Nothing | Rest::Length(0) => return Ok(None),
                Rest::Length(left) => {
                    let piece = some(stream, left, most).await?;
                    ensure!(!piece.is_empty(), "the stream ended within a body");
                    self.0 = Rest::Length(left - piece.len() as u64);
                    return Ok(Some(piece));
                }
                Rest::Close => {
                    let piece = some(stream, u64::MAX, most).await?;
                    if piece.is_empty() {
                        self.0 = Rest::Nothing;
                        return Ok(None);
                    }
                    return Ok(Some(piece));
                }
                Rest::Size => {
                    let size = line(stream).await?.context("the stream ended between two chunks")?;
                    let digits = size.split(';').next().unwrap_or_default().trim();
                    let size =
                        u64::from_str_radix(digits, 16).with_context(|| format!("not a size: {size:?}"))?;
                    if size == 0 {
                        let within = "the stream ended within the trailers";
                        while !line(stream).await?.context(within)?.is_empty() {}
                        self.0 = Rest::Nothing;
                        return Ok(None);
                    }
                    self.0 = Rest::Chunk(size);
                }
                Rest::Chunk(0) => {
                    let end = line(stream).await?.context("the stream ended after a chunk")?;
                    ensure!(end.is_empty(), "a chunk is longer than announced");
                    self.0 = Rest::Size;
                }
                Rest::Chunk(left) => {
                    let piece = some(stream, left, most).await?;
                    ensure!(!piece.is_empty(), "the stream ended within a chunk");
                    self.0 = Rest::Chunk(left - piece.len() as u64);
                    return Ok(Some(piece));
                }
            }
        }
    }
}

/// Takes what has come, at least one byte unless the stream has ended.
async fn some(stream: &mut (impl AsyncBufRead + Unpin), left: u64, most: usize) -> Result<Vec<u8>> {
    let come = stream.fill_buf().await?;
    let take = come.len().min(most).min(usize::try_from(left).unwrap_or(usize::MAX));
    let piece = come[..take].to_vec();
    stream.consume(take);
    Ok(piece)
}

/// Appends a chunk. An empty one is not appended, since it would be the last one.
pub fn put_chunk(out: &mut Vec<u8>, data: &[u8]) {
    if !data.is_empty() {
        out.extend_from_slice(format!("{:x}\r\n", data.len()).as_bytes());
        out.extend_from_slice(data);
        out.extend_from_slice(b"\r\n");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn body(bytes: &[u8], framing: Framing) -> (String, bool) {
        let mut stream = bytes;
        let body = read_body(&mut stream, framing).await;
        (String::from_utf8(body.bytes).unwrap(), body.complete)
    }

    #[tokio::test]
    async fn a_body_that_ends_early_is_not_complete() {
        assert_eq!(body(b"abc", Framing::Length(3)).await, ("abc".to_owned(), true));
        assert_eq!(body(b"ab", Framing::Length(3)).await, ("ab".to_owned(), false));
        let mut whole = Vec::new();
        for part in ["abc", "", "defghijklmnopqrst"] {
            put_chunk(&mut whole, part.as_bytes());
        }
        assert_eq!(body(&whole, Framing::Chunked).await, ("abcdefghijklmnopqrst".to_owned(), false));
        whole.extend_from_slice(b"0\r\nA: b\r\n\r\n");
        assert_eq!(body(&whole, Framing::Chunked).await, ("abcdefghijklmnopqrst".to_owned(), true));
        assert!(!body(&whole[..whole.len() - 1], Framing::Chunked).await.1);
    }

    #[tokio::test]
    async fn a_piece_is_there_before_the_next_one_has_come() {
        let (client, mut server) = tokio::io::duplex(64);
        let mut stream = tokio::io::BufReader::new(client);
        let mut pieces = Pieces::new(Framing::Chunked);
        for text in ["one", "more than it takes at once"] {
            let mut chunk = Vec::new();
            put_chunk(&mut chunk, text.as_bytes());
            tokio::io::AsyncWriteExt::write_all(&mut server, &chunk).await.unwrap();
            let mut read = Vec::new();
            while read.len() < text.len() {
                let piece = pieces.next(&mut stream, 10).await.unwrap().unwrap();
                assert!((1..=10).contains(&piece.len()));
                read.extend(piece);
            }
            assert_eq!(read, text.as_bytes());
        }
        drop(server);
        assert!(pieces.next(&mut stream, 10).await.is_err(), "the last chunk is missing");
    }

    #[tokio::test]
    async fn heads_are_read_field_by_field() {
        let mut stream = &b"HTTP/1.1 200 OK\r\nA-b:  c \r\na-B:\r\nConnection: X, close\r\n\r\nrest"[..];
        let head = read_head(&mut stream).await.unwrap().unwrap();
        assert_eq!((head.status().unwrap(), stream), (200, &b"rest"[..]));
        assert_eq!(head.get("a-b"), Some("c"));
        assert_eq!(head.fields[1], ("a-b".to_owned(), String::new()));
        assert_eq!(head.tokens("connection"), ["x", "close"]);
        assert_eq!(head.framing_of_response("GET").unwrap(), Framing::Close);
        assert_eq!(head.framing_of_response("HEAD").unwrap(), Framing::Length(0));
        assert_eq!(read_head(&mut &b""[..]).await.unwrap(), None);
        assert!(read_head(&mut &b"HTTP/1.1 200 OK\r\nA: b\r\n"[..]).await.is_err());
        let both = Head {
            line: String::new(),
            fields: vec![
                ("content-length".to_owned(), "1".to_owned()),
                ("transfer-encoding".to_owned(), "chunked".to_owned()),
            ],
        };
        assert!(both.framing_of_request().is_err());
    }
}
