//! Worked examples of each rule, random streams against a model, and hostile bytes.

use std::string::String;

mod examples;
mod random;
mod unlocked_reads;

use super::*;

/// Appends the events of a step: `S`tarted, `F`inished with status, `X` cut, `~` stray, `!` lost, `O`paque, `M`issed,
/// `2` for HTTP/2.
fn log(out: &mut String, happened: Http1Events, status: u16) {
    if happened & FINISHED != 0 {
        out.push_str(&std::format!("F{status} "));
    }
    for (bit, name) in [
        (ABORTED, "X "),
        (STARTED, "S "),
        (STRAY, "~ "),
        (DESYNC, "! "),
        (OPAQUE, "O "),
        (MISSED, "M "),
        (HTTP2, "2 "),
    ] {
        if happened & bit != 0 {
            out.push_str(name);
        }
    }
}

/// Small, so that heads are split between windows.
type TestWindow = [u64; 24 + scan::MARGIN_WORDS];

/// Copies bytes as the eBPF programs do: words behind them stay as they were.
fn fill(window: &mut TestWindow, bytes: &[u8]) -> u32 {
    let len = bytes.len().min(24 * 8);
    for (index, chunk) in bytes[..len].chunks(8).enumerate() {
        let mut word = window[index].to_ne_bytes();
        word[..chunk.len()].copy_from_slice(chunk);
        window[index] = u64::from_ne_bytes(word);
    }
    len as u32
}

/// Connection with its driver, like `ebpf/src/count.rs`, without a limit on steps.
struct Http1Fixture {
    conn: Http1Connection,
    sent: [u32; 2],
    window: TestWindow,
    log: String,
    steps: u32,
}

impl Http1Fixture {
    fn new() -> Self {
        // Sequence numbers wrap early in every test.
        let sent = [u32::MAX - 40, u32::MAX - 90];
        let window = [0x5a0a_0d0a_0d0a_0d0a; 24 + scan::MARGIN_WORDS];
        Self {
            conn: Http1Connection::new(sent[0], sent[1]),
            sent,
            window,
            log: String::new(),
            steps: 0,
        }
    }

    fn request(&mut self, bytes: &[u8]) {
        let seq = self.sent[0];
        self.sent[0] = seq.wrapping_add(bytes.len() as u32);
        self.request_at(seq, bytes);
    }

    fn response(&mut self, bytes: &[u8]) {
        let seq = self.sent[1];
        self.sent[1] = seq.wrapping_add(bytes.len() as u32);
        self.response_at(seq, bytes);
    }

    /// Passes a segment of the client that begins at `seq`. Returns false if the bytes before it are needed first.
    fn request_at(&mut self, seq: u32, bytes: &[u8]) -> bool {
        if self.conn.rx.state == state::DESYNC {
            self.conn.resync_requests(seq);
        }
        loop {
            let seek = self.conn.rx.seek(seq, bytes.len() as u32);
            self.conn.after_request_seek();
            let offset = match seek {
                SeekResult::ReadAt(offset) => offset as usize,
                SeekResult::Done => return true,
                SeekResult::Gap => return false,
            };
            let len = fill(&mut self.window, &bytes[offset..]);
            let read = self.conn.read_request(&mut self.window, len, true);
            self.check(read, len, seq.wrapping_add(offset as u32), self.conn.rx.next);
            log(&mut self.log, read.events, 0);
        }
    }

    /// Passes a segment of the server that begins at `seq`. Returns false if the bytes before it are needed first.
    fn response_at(&mut self, seq: u32, bytes: &[u8]) -> bool {
        loop {
            let seek = self.conn.tx.seek(seq, bytes.len() as u32);
            let happened = self.conn.after_response_seek();
            log(&mut self.log, happened, self.conn.tx.status);
            let offset = match seek {
                SeekResult::ReadAt(offset) => offset as usize,
                SeekResult::Done => return true,
                SeekResult::Gap => return false,
            };
            let len = fill(&mut self.window, &bytes[offset..]);
            let read = self.conn.read_response(&mut self.window, len, true);
            self.check(read, len, seq.wrapping_add(offset as u32), self.conn.tx.next);
            log(&mut self.log, read.events, self.conn.tx.status);
        }
    }

    fn check(&mut self, read: WindowRead, len: u32, from: u32, next: u32) {
        self.steps += 1;
        assert!((1..=len).contains(&read.consumed), "{read:?} of {len}");
        assert_eq!(from.wrapping_add(read.consumed), next);
    }

    fn close(&mut self) {
        let happened = self.conn.close(true);
        log(&mut self.log, happened, self.conn.tx.status);
    }

    fn take_log(&mut self) -> String {
        std::mem::take(&mut self.log).trim_end().into()
    }
}

/// Passes a conversation (`>` request bytes, `<` response bytes) in pieces of at most `piece` bytes, and then closes
/// the connection. Returns the log, in which `|` stands before the events of the close.
fn play_conversation(conversation: &[(char, &str)], piece: usize) -> String {
    let mut wire = Http1Fixture::new();
    for (from, text) in conversation {
        for part in text.as_bytes().chunks(piece) {
            if *from == '>' { wire.request(part) } else { wire.response(part) }
        }
    }
    wire.log.push('|');
    wire.close();
    assert!(!wire.conn.is_busy());
    wire.take_log()
}

/// Returns the log of a conversation, which must not depend on the split.
fn conversation_log(conversation: &[(char, &str)]) -> String {
    let whole = play_conversation(conversation, usize::MAX);
    for piece in 1..48 {
        assert_eq!(play_conversation(conversation, piece), whole, "in pieces of {piece}");
    }
    whole
}
