//! Pure: inspection of the frames that a client sends over HTTP/2 (RFC 9113 §4.1, §6; RFC 7541 §5, §6). It goes only as
//! far as needed to count the memory that the frames make the crate h2 hold.
//!
//! In the dynamic table, h2 keeps `:path`, `:authority` and `:scheme` as parts of the buffers that they came in
//! (`hpack/decoder.rs`). An entry of 40 bytes can therefore hold a buffer of many thousand. Clients are asked to keep
//! no table (`SETTINGS_HEADER_TABLE_SIZE` 0). h2 empties its own table when the client announces that at the beginning
//! of a block (RFC 7541 §4.2). Until a client does, the bytes that its entries may hold are counted.

use datapath::h2::{frame_flag, frame_kind};

/// Bytes of a HEADERS frame that state its priority.
const HEADERS_PRIORITY_BYTES: usize = 5;
/// Largest payload of a frame that h2 accepts: the default of `SETTINGS_MAX_FRAME_SIZE`.
const MAX_FRAME_BYTES: usize = 16 << 10;
/// Maximum bytes that one entry keeps alive: those of its own block, and the rest of the buffer that they came in.
const MAX_BYTES_PER_ENTRY: usize = 2 * MAX_FRAME_BYTES;
/// Entries of a table of 4,096 bytes, each of at least 38: `:path` with one byte is the smallest that keeps a buffer
/// alive, and 32 bytes are added to each (RFC 7541 §4.1).
const MAX_TABLE_ENTRIES: usize = 4096 / 38;

/// Inspector of the frames of one client connection.
#[derive(Debug)]
pub struct Http2FrameInspector {
    /// Bytes of the present frame's payload that are still to come.
    payload_left: usize,
    payload: FramePayload,
    /// Received bytes of the next frame's header.
    header: [u8; 9],
    header_filled: usize,
    block_scanner: HpackBlockScanner,
    /// True once the client has acknowledged the settings: from now on it knows that its table must be empty.
    is_settings_acked: bool,
    /// True once the client has announced an empty table at the beginning of a block.
    is_table_disabled: bool,
    /// Bytes received since the last block that left an entry in the table.
    bytes_since_entry: usize,
    /// Bytes that entries of the table may hold.
    entry_bytes: usize,
    /// Bytes of the largest frame received.
    largest_frame: usize,
}

/// Kind of the present frame's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FramePayload {
    /// Payload of a DATA frame, a part of a body.
    Data,
    /// Payload of a block of header fields. `before`: bytes before the block, still to skip. `padding`: bytes behind
    /// it, `None` until their number was received.
    HeaderBlock {
        before: usize,
        padding: Option<usize>,
        is_last: bool,
    },
    Other,
}

impl Http2FrameInspector {
    /// Creates the inspector of a new connection, which begins with a preface of that length.
    pub fn after_preface(preface_bytes: usize) -> Self {
        Self {
            payload_left: preface_bytes,
            payload: FramePayload::Other,
            header: [0; 9],
            header_filled: 0,
            block_scanner: HpackBlockScanner::default(),
            is_settings_acked: false,
            is_table_disabled: false,
            bytes_since_entry: 0,
            entry_bytes: 0,
            largest_frame: 0,
        }
    }

    /// Inspects received bytes. Returns the number of those that belong to bodies.
    pub fn inspect(&mut self, mut bytes: &[u8]) -> usize {
        let mut data = 0;
        while !bytes.is_empty() {
            if self.payload_left == 0 {
                bytes = self.parse_frame_header(bytes);
                continue;
            }
            let (piece, rest) = bytes.split_at(self.payload_left.min(bytes.len()));
            (self.payload_left, self.bytes_since_entry, bytes) =
                (self.payload_left - piece.len(), self.bytes_since_entry + piece.len(), rest);
            match self.payload {
                FramePayload::Data => data += piece.len(),
                FramePayload::HeaderBlock { .. } => self.parse_header_block(piece),
                FramePayload::Other => {}
            }
        }
        data
    }

    /// Maximum number of bytes that h2 holds between requests: for its dynamic table, and in the buffer that
    /// the largest frame needed.
    pub fn max_held_bytes(&self) -> usize {
        self.entry_bytes + self.largest_frame
    }

    /// Parses bytes of a frame header. Returns the bytes behind it.
    fn parse_frame_header<'a>(&mut self, bytes: &'a [u8]) -> &'a [u8] {
        let (taken, rest) =
            bytes.split_at((self.header.len() - self.header_filled).min(bytes.len()));
        self.header[self.header_filled..self.header_filled + taken.len()].copy_from_slice(taken);
        (self.header_filled, self.bytes_since_entry) =
            (self.header_filled + taken.len(), self.bytes_since_entry + taken.len());
        if self.header_filled < self.header.len() {
            return rest;
        }
        let [high, middle, low, kind, flags, ..] = self.header;
        // The length has 24 bits, in network order (RFC 9113 §4.1).
        self.payload_left = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        self.header_filled = 0;
        // A larger frame is an error of the connection, and h2 buffers none of it.
        self.largest_frame = self.largest_frame.max(self.payload_left.min(MAX_FRAME_BYTES));
        let has_flag = |bit: u8| flags & bit != 0;
        let is_last = has_flag(frame_flag::END_HEADERS);
        self.payload = match kind {
            frame_kind::DATA => FramePayload::Data,
            frame_kind::HEADERS => FramePayload::HeaderBlock {
                before: if has_flag(frame_flag::PRIORITY) { HEADERS_PRIORITY_BYTES } else { 0 },
                padding: (!has_flag(frame_flag::PADDED)).then_some(0),
                is_last,
            },
            frame_kind::CONTINUATION => {
                FramePayload::HeaderBlock { before: 0, padding: Some(0), is_last }
            }
            frame_kind::SETTINGS => {
                self.is_settings_acked |= has_flag(frame_flag::ACK);
                FramePayload::Other
            }
            _ => FramePayload::Other,
        };
        // A frame without a payload may also end a block.
        if self.payload_left == 0 {
            self.end_block();
        }
        rest
    }

    /// Parses bytes of a block of header fields.
    fn parse_header_block(&mut self, mut piece: &[u8]) {
        let FramePayload::HeaderBlock { before, padding, .. } = &mut self.payload else { return };
        let padding = *padding.get_or_insert_with(|| {
            let length = usize::from(piece[0]);
            piece = &piece[1..];
            length
        });
        let skipped = (*before).min(piece.len());
        (*before, piece) = (*before - skipped, &piece[skipped..]);
        // Padding lies at the end of the payload, and `payload_left` bytes of the payload are still to come.
        let fields = (piece.len() + self.payload_left).saturating_sub(padding).min(piece.len());
        self.block_scanner.scan(&piece[..fields]);
        if self.payload_left == 0 {
            self.end_block();
        }
    }

    /// Ends the frame, and with it the block if it is the block's last frame.
    fn end_block(&mut self) {
        if !matches!(self.payload, FramePayload::HeaderBlock { is_last: true, .. }) {
            return;
        }
        let block = std::mem::take(&mut self.block_scanner);
        // An empty table before the acknowledgement may be followed by entries again: the client does not know its
        // limit yet.
        if block.clears_table && self.is_settings_acked {
            (self.is_table_disabled, self.entry_bytes) = (true, 0);
        }
        if block.adds_entry && !self.is_table_disabled {
            // The entry keeps alive at most what was received since the entry before it. Earlier bytes were counted
            // with that one.
            let entry_bytes = self.bytes_since_entry.min(MAX_BYTES_PER_ENTRY);
            self.entry_bytes =
                (self.entry_bytes + entry_bytes).min(MAX_TABLE_ENTRIES * MAX_BYTES_PER_ENTRY);
            self.bytes_since_entry = 0;
        }
    }
}

/// Scanner of a block of header fields, for which only lengths matter.
#[derive(Debug, Default)]
struct HpackBlockScanner {
    position: HpackPosition,
    /// True if the block adds an entry to the dynamic table.
    adds_entry: bool,
    /// True if the block announces a table of size 0 (RFC 7541 §6.3).
    clears_table: bool,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum HpackPosition {
    /// At the first byte of a field.
    #[default]
    Field,
    /// Within a number of several bytes (RFC 7541 §5.1).
    Integer { of: HpackInteger, value: usize, shift: u32 },
    /// At the length of a string; `strings` counts the strings to come, including this one.
    StringLength { strings: u8 },
    /// Within a string, of which `left` bytes are to come.
    StringBytes { left: usize, strings: u8 },
}

/// Meaning of a number in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum HpackInteger {
    /// Index of a table entry that gives name and value.
    IndexedField,
    /// Index of a table entry that gives the name; 0: the name follows as a string.
    IndexedName,
    /// New maximum size of the dynamic table.
    TableSize,
    /// Length of a string in bytes.
    StringLength { strings: u8 },
}

impl HpackBlockScanner {
    fn scan(&mut self, mut bytes: &[u8]) {
        while let [first, rest @ ..] = bytes {
            if let HpackPosition::StringBytes { left, strings } = self.position {
                let count = left.min(bytes.len());
                self.position = match left - count {
                    0 => position_after_string(strings),
                    left => HpackPosition::StringBytes { left, strings },
                };
                bytes = &bytes[count..];
                continue;
            }
            self.scan_byte(*first);
            bytes = rest;
        }
    }

    fn scan_byte(&mut self, byte: u8) {
        match self.position {
            HpackPosition::Field if byte & 0x80 != 0 => {
                self.start_integer(HpackInteger::IndexedField, byte, 0x7f)
            }
            HpackPosition::Field if byte & 0x40 != 0 => {
                self.adds_entry = true;
                self.start_integer(HpackInteger::IndexedName, byte, 0x3f);
            }
            HpackPosition::Field if byte & 0x20 != 0 => {
                self.start_integer(HpackInteger::TableSize, byte, 0x1f)
            }
            HpackPosition::Field => self.start_integer(HpackInteger::IndexedName, byte, 0x0f),
            HpackPosition::StringLength { strings } => {
                self.start_integer(HpackInteger::StringLength { strings }, byte, 0x7f)
            }
            HpackPosition::Integer { of, value, shift } => {
                let more = usize::from(byte & 0x7f).checked_shl(shift).unwrap_or(usize::MAX);
                let value = value.saturating_add(more);
                if byte & 0x80 == 0 {
                    self.finish_integer(of, value);
                } else {
                    self.position =
                        HpackPosition::Integer { of, value, shift: shift.saturating_add(7) };
                }
            }
            // The bytes of a string are skipped by the caller.
            HpackPosition::StringBytes { .. } => {}
        }
    }

    /// Begins a number in the low bits of a byte.
    fn start_integer(&mut self, of: HpackInteger, byte: u8, mask: u8) {
        let value = usize::from(byte & mask);
        if byte & mask == mask {
            self.position = HpackPosition::Integer { of, value, shift: 0 };
        } else {
            self.finish_integer(of, value);
        }
    }

    fn finish_integer(&mut self, of: HpackInteger, value: usize) {
        self.position = match of {
            HpackInteger::IndexedField => HpackPosition::Field,
            HpackInteger::TableSize => {
                self.clears_table |= value == 0;
                HpackPosition::Field
            }
            HpackInteger::IndexedName => {
                HpackPosition::StringLength { strings: if value == 0 { 2 } else { 1 } }
            }
            HpackInteger::StringLength { strings } if value == 0 => position_after_string(strings),
            HpackInteger::StringLength { strings } => {
                HpackPosition::StringBytes { left: value, strings }
            }
        };
    }
}

/// Position behind a string. `strings` counts the strings from that one on.
fn position_after_string(strings: u8) -> HpackPosition {
    if strings > 1 {
        HpackPosition::StringLength { strings: strings - 1 }
    } else {
        HpackPosition::Field
    }
}

#[cfg(test)]
mod tests;
