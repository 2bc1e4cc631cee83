//! Pure: what comes in over an HTTP/2 connection, followed just far enough to count what it makes the library hold
//! (RFC 9113 §4.1, §6; RFC 7541 §5, §6).
//!
//! The library keeps a client's paths in the table of fields as parts of the buffers that they came in (`h2`,
//! `hpack/decoder.rs`), so that an entry of 40 bytes holds a buffer of many thousand. Clients are told to keep no table
//! (`SETTINGS_HEADER_TABLE_SIZE` 0), and the library empties its own when the client says so at the beginning of a block
//! (RFC 7541 §4.2). Until a client does, what its entries may hold is counted.

use common::h2::{flag, kind};

/// Bytes of a HEADERS frame that say its priority.
const PRIORITY_BYTES: usize = 5;
/// Bytes of a buffer that one entry can hold beside the bytes of its own block.
const BUFFER: usize = 16 << 10;
/// Entries of a table of 4,096 bytes, each of 38 at least: `:path` and one byte count 32 more (RFC 7541 §4.1).
const ENTRIES: usize = 4096 / 38;

/// The frames of a client.
#[derive(Debug)]
pub struct Frames {
    /// Bytes to pass before the next frame.
    left: usize,
    part: Part,
    /// What has come of the next frame's beginning.
    header: [u8; 9],
    filled: usize,
    fields: Fields,
    /// Whether the client has taken note that it has no table.
    knows: bool,
    /// Whether it has said so since.
    has_no_table: bool,
    /// Bytes since the last block that left an entry in the table.
    since: usize,
    /// Bytes that entries of the table may hold.
    entries: usize,
    /// Bytes of the largest frame that has come.
    largest: usize,
}

/// What the bytes of a frame are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    /// Of a body.
    Data,
    /// Of a block of fields: bytes before it, and of padding behind it. Without the padding's length as long as that
    /// has not come.
    Block {
        before: usize,
        padding: Option<usize>,
        is_last: bool,
    },
    Other,
}

impl Frames {
    /// From the beginning of a connection: first its preface.
    pub fn after_preface(preface: usize) -> Self {
        Self {
            left: preface,
            part: Part::Other,
            header: [0; 9],
            filled: 0,
            fields: Fields::default(),
            knows: false,
            has_no_table: false,
            since: 0,
            entries: 0,
            largest: 0,
        }
    }

    /// Takes in what has come. Returns how many bytes of it are of bodies.
    pub fn count(&mut self, mut bytes: &[u8]) -> usize {
        let mut data = 0;
        while !bytes.is_empty() {
            if self.left == 0 {
                bytes = self.begin(bytes);
                continue;
            }
            let (piece, rest) = bytes.split_at(self.left.min(bytes.len()));
            (self.left, self.since, bytes) =
                (self.left - piece.len(), self.since + piece.len(), rest);
            match self.part {
                Part::Data => data += piece.len(),
                Part::Block { .. } => self.follow(piece),
                Part::Other => {}
            }
        }
        data
    }

    /// Bytes that the library holds at most between requests: for its table of fields, and in the buffer that the largest
    /// frame needed.
    pub fn held(&self) -> usize {
        self.entries + self.largest
    }

    /// Takes in bytes of a frame's beginning. Returns the rest.
    fn begin<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (some, rest) = bytes.split_at((self.header.len() - self.filled).min(bytes.len()));
        self.header[self.filled..self.filled + some.len()].copy_from_slice(some);
        (self.filled, self.since) = (self.filled + some.len(), self.since + some.len());
        if self.filled < self.header.len() {
            return rest;
        }
        let [high, middle, low, which, flags, ..] = self.header;
        self.left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.filled = 0;
        // A larger frame ends the connection.
        self.largest = self.largest.max(self.left.min(BUFFER));
        let is = |bit: u8| flags & bit != 0;
        let is_last = is(flag::END_HEADERS);
        self.part = match which {
            kind::DATA => Part::Data,
            kind::HEADERS => Part::Block {
                before: if is(flag::PRIORITY) { PRIORITY_BYTES } else { 0 },
                padding: (!is(flag::PADDED)).then_some(0),
                is_last,
            },
            kind::CONTINUATION => Part::Block { before: 0, padding: Some(0), is_last },
            kind::SETTINGS => {
                self.knows |= is(flag::ACK);
                Part::Other
            }
            _ => Part::Other,
        };
        // A frame without a payload may end a block as well.
        if self.left == 0 {
            self.end_block();
        }
        rest
    }

    /// Takes in bytes of a block.
    fn follow(&mut self, mut piece: &[u8]) {
        let Part::Block { before, padding, .. } = &mut self.part else { return };
        let padding = *padding.get_or_insert_with(|| {
            let length = usize::from(piece[0]);
            piece = &piece[1..];
            length
        });
        let skipped = (*before).min(piece.len());
        (*before, piece) = (*before - skipped, &piece[skipped..]);
        let fields = (piece.len() + self.left).saturating_sub(padding).min(piece.len());
        self.fields.take(&piece[..fields]);
        if self.left == 0 {
            self.end_block();
        }
    }

    /// The frame is over, and with it the block, if it is the last one of that.
    fn end_block(&mut self) {
        if !matches!(self.part, Part::Block { is_last: true, .. }) {
            return;
        }
        let block = std::mem::take(&mut self.fields);
        if block.empties && self.knows {
            (self.has_no_table, self.entries) = (true, 0);
        }
        if block.adds && !self.has_no_table {
            // What came since the entry before it lies in other buffers, or in the same one.
            let most = ENTRIES * (BUFFER + BUFFER);
            self.entries = (self.entries + self.since.min(BUFFER + BUFFER)).min(most);
            self.since = 0;
        }
    }
}

/// A block of fields, of which only the lengths matter.
#[derive(Debug, Default)]
struct Fields {
    at: At,
    /// Whether it adds an entry to the table.
    adds: bool,
    /// Whether it says that the table has no room (RFC 7541 §6.3).
    empties: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum At {
    /// A field begins.
    #[default]
    Field,
    /// A number goes on (RFC 7541 §5.1).
    Number { of: Number, value: usize, shift: u32 },
    /// The length of a string; so many strings come, with this one.
    Length { strings: u8 },
    /// So many bytes of a string.
    Text { left: usize, strings: u8 },
}

/// What a number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    /// Which field of the table it is, with its value.
    Field,
    /// Which name of the table it is; 0: the name follows.
    Name,
    /// How large the table may be.
    TableSize,
    /// How long a string is.
    Length { strings: u8 },
}

impl Fields {
    fn take(&mut self, mut bytes: &[u8]) {
        while let [first, rest @ ..] = bytes {
            if let At::Text { left, strings } = self.at {
                let some = left.min(bytes.len());
                self.at = match left - some {
                    0 => after_string(strings),
                    left => At::Text { left, strings },
                };
                bytes = &bytes[some..];
                continue;
            }
            self.byte(*first);
            bytes = rest;
        }
    }

    fn byte(&mut self, byte: u8) {
        match self.at {
            At::Field if byte & 0x80 != 0 => self.number(Number::Field, byte, 0x7f),
            At::Field if byte & 0x40 != 0 => {
                self.adds = true;
                self.number(Number::Name, byte, 0x3f);
            }
            At::Field if byte & 0x20 != 0 => self.number(Number::TableSize, byte, 0x1f),
            At::Field => self.number(Number::Name, byte, 0x0f),
            At::Length { strings } => self.number(Number::Length { strings }, byte, 0x7f),
            At::Number { of, value, shift } => {
                let more = usize::from(byte & 0x7f).checked_shl(shift).unwrap_or(usize::MAX);
                let value = value.saturating_add(more);
                if byte & 0x80 == 0 {
                    self.is_told(of, value);
                } else {
                    self.at = At::Number { of, value, shift: shift.saturating_add(7) };
                }
            }
            // Its bytes are passed over.
            At::Text { .. } => {}
        }
    }

    /// A number begins in the low bits of a byte.
    fn number(&mut self, of: Number, byte: u8, mask: u8) {
        let value = usize::from(byte & mask);
        if byte & mask == mask {
            self.at = At::Number { of, value, shift: 0 };
        } else {
            self.is_told(of, value);
        }
    }

    fn is_told(&mut self, of: Number, value: usize) {
        self.at = match of {
            Number::Field => At::Field,
            Number::TableSize => {
                self.empties |= value == 0;
                At::Field
            }
            Number::Name => At::Length { strings: if value == 0 { 2 } else { 1 } },
            Number::Length { strings } if value == 0 => after_string(strings),
            Number::Length { strings } => At::Text { left: value, strings },
        };
    }
}

/// What comes behind the first of so many strings.
fn after_string(strings: u8) -> At {
    if strings > 1 { At::Length { strings: strings - 1 } } else { At::Field }
}

#[cfg(test)]
mod tests;
