//! Pure: bodies in chunks (RFC 9112 §7.1).
//!
//! What follows a chunk's size is left unread but bounded, and lines end with CRLF alone: a reader that is more generous
//! than another ends a message elsewhere.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::HeaderMap;

use super::{Malformed, fields};

/// Bytes a chunk's first line may have.
const MAX_LINE: usize = 4 << 10;
/// Bytes that all extensions of one body may have.
const MAX_EXTENSIONS: usize = 16 << 10;
/// Bytes the fields behind a body may have.
const MAX_TRAILERS: usize = 64 << 10;

/// Where in a body its reader is.
#[derive(Debug, Default)]
pub struct Chunks {
    at: At,
    extensions: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum At {
    #[default]
    Size,
    Data(u64),
    DataEnd,
    Trailers,
    End,
}

/// What comes next of a body.
#[derive(Debug, PartialEq, Eq)]
pub enum Piece {
    /// Bytes of it.
    Data(Bytes),
    /// The fields behind it. The end follows.
    Trailers(HeaderMap),
    /// Nothing any more.
    End,
}

impl Chunks {
    /// Takes the next piece off the front of `from`; `None` if more has to come first.
    pub fn read(&mut self, from: &mut BytesMut) -> Result<Option<Piece>, Malformed> {
        loop {
            match self.at {
                At::Size => match self.size(from)? {
                    None => return Ok(None),
                    Some(0) => self.at = At::Trailers,
                    Some(size) => self.at = At::Data(size),
                },
                At::Data(_) if from.is_empty() => return Ok(None),
                At::Data(left) => {
                    let some = left.min(from.len() as u64);
                    let data = from.split_to(usize::try_from(some).unwrap_or(usize::MAX)).freeze();
                    self.at = if some == left { At::DataEnd } else { At::Data(left - some) };
                    return Ok(Some(Piece::Data(data)));
                }
                At::DataEnd if from.starts_with(b"\r\n") => {
                    from.advance(2);
                    self.at = At::Size;
                }
                At::DataEnd if b"\r\n".starts_with(from) => return Ok(None),
                At::DataEnd => return Err(Malformed::Chunk),
                At::Trailers => return self.trailers(from),
                At::End => return Ok(Some(Piece::End)),
            }
        }
    }

    /// Whether the whole body was read.
    pub fn is_over(&self) -> bool {
        self.at == At::End
    }

    fn size(&mut self, from: &mut BytesMut) -> Result<Option<u64>, Malformed> {
        let line = &from[..from.len().min(MAX_LINE)];
        let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
            let is_hopeless = line.len() == MAX_LINE || size_of(line).is_none() && !line.is_empty();
            return if is_hopeless { Err(Malformed::Chunk) } else { Ok(None) };
        };
        let line = line[..end].strip_suffix(b"\r").ok_or(Malformed::Chunk)?;
        let (size, rest) = size_of(line).ok_or(Malformed::Chunk)?;
        if rest.contains(&b'\r') || !matches!(rest.trim_ascii_start(), [] | [b';', ..]) {
            return Err(Malformed::Chunk);
        }
        self.extensions += rest.len();
        if self.extensions > MAX_EXTENSIONS {
            return Err(Malformed::Chunk);
        }
        from.advance(end + 1);
        Ok(Some(size))
    }

    fn trailers(&mut self, from: &mut BytesMut) -> Result<Option<Piece>, Malformed> {
        if from.starts_with(b"\r\n") {
            from.advance(2);
            self.at = At::End;
            return Ok(Some(Piece::End));
        }
        let mut count = 16;
        loop {
            let mut room = vec![httparse::EMPTY_HEADER; count];
            match httparse::parse_headers(from, &mut room) {
                Ok(httparse::Status::Complete((length, _))) if length > MAX_TRAILERS => {
                    return Err(Malformed::TooLarge);
                }
                Ok(httparse::Status::Complete((length, found))) => {
                    let trailers = fields(found)?;
                    from.advance(length);
                    self.at = At::End;
                    return Ok(Some(Piece::Trailers(trailers)));
                }
                Ok(httparse::Status::Partial) if from.len() <= MAX_TRAILERS => return Ok(None),
                Ok(httparse::Status::Partial) => return Err(Malformed::TooLarge),
                Err(httparse::Error::TooManyHeaders) => count *= 4,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// The number at a line's beginning, and what follows it. `None`: there is none, or it is too large to be meant.
fn size_of(line: &[u8]) -> Option<(u64, &[u8])> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (number, rest) = line.split_at(digits);
    let number = str::from_utf8(number).ok()?;
    Some((u64::from_str_radix(number, 16).ok()?, rest))
}

/// Writes the line before a chunk of this size. [`AFTER_CHUNK`] follows the chunk.
pub fn write_size(size: usize, out: &mut BytesMut) {
    out.put_slice(format!("{size:x}\r\n").as_bytes());
}

/// Ends a chunk.
pub const AFTER_CHUNK: &[u8] = b"\r\n";

/// Writes the last chunk and the fields behind it.
pub fn write_end(trailers: Option<&HeaderMap>, out: &mut BytesMut) {
    out.put_slice(b"0\r\n");
    for (name, value) in trailers.into_iter().flatten() {
        super::write_field(name, value.as_bytes(), out);
    }
    out.put_slice(b"\r\n");
}
