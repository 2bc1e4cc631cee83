//! Pure: bodies in chunks (RFC 9112 §7.1).
//!
//! The extensions behind a chunk's size are ignored but bounded, and lines end with CRLF alone. A reader that accepts
//! more than another one finds the end of the message elsewhere.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::HeaderMap;

use super::{Http1ParseError, parse_fields};

/// Maximum number of bytes of a chunk's first line.
const MAX_SIZE_LINE: usize = 4 << 10;
/// Maximum number of bytes of all extensions of one body.
const MAX_EXTENSIONS: usize = 16 << 10;
/// Maximum number of bytes of the trailer fields.
const MAX_TRAILERS: usize = 64 << 10;

/// Position of a reader in a body of chunks.
#[derive(Debug, Default)]
pub struct ChunkedDecoder {
    position: ChunkedPosition,
    /// Bytes of extensions so far, over all chunks.
    extension_bytes: usize,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum ChunkedPosition {
    #[default]
    Size,
    Data(u64),
    DataEnd,
    Trailers,
    End,
}

/// Next piece of a body.
#[derive(Debug, PartialEq, Eq)]
pub enum ChunkedPiece {
    /// Bytes of the body.
    Data(Bytes),
    /// Trailer fields behind the last chunk. The end follows.
    Trailers(HeaderMap),
    /// End of the body.
    End,
}

impl ChunkedDecoder {
    /// Removes the next piece from the front of `from`; `None` if more bytes have to come first.
    pub fn next_piece(
        &mut self,
        from: &mut BytesMut,
    ) -> Result<Option<ChunkedPiece>, Http1ParseError> {
        loop {
            match self.position {
                ChunkedPosition::Size => match self.parse_size_line(from)? {
                    None => return Ok(None),
                    Some(0) => self.position = ChunkedPosition::Trailers,
                    Some(size) => self.position = ChunkedPosition::Data(size),
                },
                ChunkedPosition::Data(_) if from.is_empty() => return Ok(None),
                ChunkedPosition::Data(left) => {
                    let count = left.min(from.len() as u64);
                    let data = from.split_to(usize::try_from(count).unwrap_or(usize::MAX)).freeze();
                    self.position = if count == left {
                        ChunkedPosition::DataEnd
                    } else {
                        ChunkedPosition::Data(left - count)
                    };
                    return Ok(Some(ChunkedPiece::Data(data)));
                }
                ChunkedPosition::DataEnd if from.starts_with(b"\r\n") => {
                    from.advance(2);
                    self.position = ChunkedPosition::Size;
                }
                ChunkedPosition::DataEnd if b"\r\n".starts_with(from) => return Ok(None),
                ChunkedPosition::DataEnd => return Err(Http1ParseError::Chunk),
                ChunkedPosition::Trailers => return self.parse_trailers(from),
                ChunkedPosition::End => return Ok(Some(ChunkedPiece::End)),
            }
        }
    }

    /// Returns true if the whole body was read.
    pub fn is_finished(&self) -> bool {
        self.position == ChunkedPosition::End
    }

    fn parse_size_line(&mut self, from: &mut BytesMut) -> Result<Option<u64>, Http1ParseError> {
        let line = &from[..from.len().min(MAX_SIZE_LINE)];
        // A line that cannot become valid is an error at once, so that a sender of garbage is not waited for.
        let Some(end) = line.iter().position(|byte| *byte == b'\n') else {
            let is_hopeless =
                line.len() == MAX_SIZE_LINE || parse_size(line).is_none() && !line.is_empty();
            return if is_hopeless { Err(Http1ParseError::Chunk) } else { Ok(None) };
        };
        let line = line[..end].strip_suffix(b"\r").ok_or(Http1ParseError::Chunk)?;
        let (size, rest) = parse_size(line).ok_or(Http1ParseError::Chunk)?;
        // A bare CR, or anything but an extension behind the size, could be the end of the line for another reader.
        if rest.contains(&b'\r') || !matches!(rest.trim_ascii_start(), [] | [b';', ..]) {
            return Err(Http1ParseError::Chunk);
        }
        self.extension_bytes += rest.len();
        if self.extension_bytes > MAX_EXTENSIONS {
            return Err(Http1ParseError::Chunk);
        }
        from.advance(end + 1);
        Ok(Some(size))
    }

    fn parse_trailers(
        &mut self,
        from: &mut BytesMut,
    ) -> Result<Option<ChunkedPiece>, Http1ParseError> {
        if from.starts_with(b"\r\n") {
            from.advance(2);
            self.position = ChunkedPosition::End;
            return Ok(Some(ChunkedPiece::End));
        }
        // The number of fields is bounded by their bytes only, so the array for them grows until all fit.
        let mut count = 16;
        loop {
            let mut fields_array = vec![httparse::EMPTY_HEADER; count];
            match httparse::parse_headers(from, &mut fields_array) {
                Ok(httparse::Status::Complete((length, _))) if length > MAX_TRAILERS => {
                    return Err(Http1ParseError::TooLarge);
                }
                // httparse accepts LF alone, which ends no line for other readers, hyper among them.
                Ok(httparse::Status::Complete((length, _))) if has_bare_lf(&from[..length]) => {
                    return Err(Http1ParseError::Chunk);
                }
                Ok(httparse::Status::Complete((length, fields))) => {
                    let trailers = parse_fields(fields)?;
                    from.advance(length);
                    self.position = ChunkedPosition::End;
                    return Ok(Some(ChunkedPiece::Trailers(trailers)));
                }
                Ok(httparse::Status::Partial) if from.len() <= MAX_TRAILERS => return Ok(None),
                Ok(httparse::Status::Partial) => return Err(Http1ParseError::TooLarge),
                Err(httparse::Error::TooManyHeaders) => count *= 4,
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Returns true if a line ends with LF alone.
fn has_bare_lf(lines: &[u8]) -> bool {
    lines.starts_with(b"\n") || lines.windows(2).any(|pair| pair[0] != b'\r' && pair[1] == b'\n')
}

/// Number at a line's beginning, and the bytes behind it. `None`: there is none, or it does not fit into 64 bits.
fn parse_size(line: &[u8]) -> Option<(u64, &[u8])> {
    let digits = line.iter().take_while(|byte| byte.is_ascii_hexdigit()).count();
    let (number, rest) = line.split_at(digits);
    let number = str::from_utf8(number).ok()?;
    Some((u64::from_str_radix(number, 16).ok()?, rest))
}

/// Writes the line before a chunk of `size` bytes. [`CHUNK_END`] follows the chunk.
pub fn write_chunk_size(size: usize, out: &mut BytesMut) {
    out.put_slice(format!("{size:x}\r\n").as_bytes());
}

/// Bytes that end a chunk.
pub const CHUNK_END: &[u8] = b"\r\n";

/// Writes the last chunk and the trailer fields.
pub fn write_last_chunk(trailers: Option<&HeaderMap>, out: &mut BytesMut) {
    out.put_slice(b"0\r\n");
    for (name, value) in trailers.into_iter().flatten() {
        super::write_field(name, value.as_bytes(), out);
    }
    out.put_slice(b"\r\n");
}
