//! Unlocked reads: commits after another CPU has moved on, and two CPUs at the begin of HTTP/2.

use super::{
    DESYNC, HTTP2, Http1Connection, Http1Direction, Http1Events, Http1Fixture, STARTED, SeekResult,
    UnlockedRead,
    examples::{GET, OK5},
    fill,
};

/// Returns an unlocked read of a whole head, on a connection that has just begun.
fn unlocked_read_of_head(wire: &Http1Fixture) -> UnlockedRead<29> {
    let mut draft = UnlockedRead::default();
    let len = fill(&mut draft.window, b"HEAD / HTTP/1.1\r\nHost: a\r\n\r\n");
    assert_eq!(draft.begin(&wire.conn.rx, wire.conn.rx.next, len), Some(0));
    draft.read(len, true, true);
    draft
}

#[test]
fn what_was_read_without_the_lock_counts_once() {
    let mut wire = Http1Fixture::new();
    let (from, draft) = (wire.conn.rx.next, unlocked_read_of_head(&wire));
    assert_eq!(wire.conn.rx.next, from, "nothing has moved yet");
    assert_eq!(wire.conn.commit_request_read(&draft), STARTED);
    assert_eq!(wire.conn.rx.next, from.wrapping_add(28));
    // The same packet on another CPU.
    assert_eq!(wire.conn.commit_request_read(&draft), 0);
    assert_eq!(wire.conn.rx.next, from.wrapping_add(28));
    // The response to HEAD: no body follows.
    wire.response(&OK5.as_bytes()[..OK5.len() - 5]);
    assert_eq!(wire.take_log(), "F200");
}

#[test]
fn what_was_read_without_the_lock_does_not_count_where_others_have_moved_on() {
    type Move = fn(&mut Http1Fixture);
    let moves: [(&str, Move); 5] = [
        ("read on", |wire| wire.request(&GET.as_bytes()[..3])),
        ("lost", |wire| assert_eq!(wire.conn.desync_requests(), DESYNC)),
        ("lost and found at the same place", |wire| {
            wire.conn.desync_requests();
            wire.conn.resync_requests(wire.conn.rx.next);
        }),
        ("closed", |wire| assert_eq!(wire.conn.close(false), 0)),
        ("HTTP/2", |wire| wire.response(b"\0\0\0\x04\0\0\0\0\0")),
    ];
    for (what, moves) in moves {
        let mut wire = Http1Fixture::new();
        let draft = unlocked_read_of_head(&wire);
        moves(&mut wire);
        let before = wire.conn;
        assert_eq!(wire.conn.commit_request_read(&draft), 0, "{what}");
        assert_eq!(wire.conn, before, "{what}");
    }
}

/// While another CPU stores what it has read, some fields of the copy are new and others old.
#[test]
fn a_copy_with_a_part_of_a_change_does_not_count() {
    type Part = fn(&mut Http1Direction);
    let parts: [(&str, Part, bool); 6] = [
        ("all of it", |_| {}, true),
        ("the length of the body", |it| it.length = 0, false),
        ("the number that is read", |it| it.value ^= 1 << 63, false),
        ("the kind of the request", |it| it.kind ^= 1, false),
        ("the name that is compared", |it| it.matched ^= 1, false),
        ("the wish to close", |it| it.close_requested ^= 1, false),
    ];
    for (what, change, counts) in parts {
        let mut wire = Http1Fixture::new();
        wire.request(b"PUT / HTTP/1.1\r\nContent-Length: 5\r\n");
        let (before, mut copied) = (wire.conn, wire.conn.rx);
        assert_eq!(copied.length, 5);
        change(&mut copied);
        let mut draft = UnlockedRead::<29>::default();
        let len = fill(&mut draft.window, b"Host: a\r\n\r\n");
        assert_eq!(draft.begin(&copied, copied.next, len), Some(0));
        draft.read(len, true, true);
        wire.conn.commit_request_read(&draft);
        assert_eq!(wire.conn != before, counts, "{what}");
    }
}

#[test]
fn an_unlocked_read_begins_where_the_segment_has_new_bytes() {
    let mut wire = Http1Fixture::new();
    let next = wire.conn.rx.next;
    let mut draft = UnlockedRead::<29>::default();
    assert_eq!(draft.begin(&wire.conn.rx, next.wrapping_sub(7), 8), Some(7));
    assert_eq!(draft.begin(&wire.conn.rx, next.wrapping_sub(7), 7), None, "an old one");
    assert_eq!(draft.begin(&wire.conn.rx, next.wrapping_add(1), 8), None, "behind a gap");
    wire.request(b"PUT / HTTP/1.1\r\nContent-Length: 5\r\n\r\n");
    assert_eq!(draft.begin(&wire.conn.rx, wire.conn.rx.next, 8), None, "a body");
    wire.conn.desync_requests();
    assert_eq!(draft.begin(&wire.conn.rx, wire.conn.rx.next, 8), None, "lost");
}

/// CPU that processes a segment, like `ebpf/src/count/http1.rs`.
struct SimCpu {
    bytes: &'static [u8],
    seq: u32,
    is_request: bool,
    draft: UnlockedRead<29>,
    have: u32,
    rounds: u32,
    next: SimCpuStep,
}

/// Next operation of a CPU, during which no other CPU acts.
#[derive(PartialEq, Eq)]
enum SimCpuStep {
    Read,
    Commit,
    HandOff,
    Done,
}

impl SimCpu {
    fn new(bytes: &'static [u8], seq: u32, is_request: bool) -> Self {
        let draft = UnlockedRead::default();
        Self { bytes, seq, is_request, draft, have: 0, rounds: 0, next: SimCpuStep::Read }
    }

    /// Takes a step and returns its events; `handoff` becomes the positions at which HTTP/2 began.
    fn step(&mut self, conn: &mut Http1Connection, handoff: &mut Option<[u32; 2]>) -> Http1Events {
        let mut happened = 0;
        self.next = match self.next {
            SimCpuStep::Read => {
                let direction = if self.is_request { &conn.rx } else { &conn.tx };
                let begins = self.draft.begin(direction, self.seq, self.bytes.len() as u32);
                self.have = 0;
                if let Some(offset) = begins {
                    self.have = fill(&mut self.draft.window, &self.bytes[offset as usize..]);
                    self.draft.read(self.have, self.is_request, self.rounds > 0);
                }
                self.rounds += 1;
                SimCpuStep::Commit
            }
            SimCpuStep::Commit => {
                let seek;
                (happened, seek) = self.commit(conn);
                match seek {
                    _ if conn.is_http2() => SimCpuStep::HandOff,
                    SeekResult::ReadAt(_) => SimCpuStep::Read,
                    SeekResult::Done => SimCpuStep::Done,
                    SeekResult::Gap => panic!("there is none"),
                }
            }
            SimCpuStep::HandOff => {
                let begun = conn.http2_handoff();
                handoff.get_or_insert([
                    begun.rx_next - begun.preface_read,
                    begun.tx_next - begun.server_frame_read,
                ]);
                SimCpuStep::Done
            }
            SimCpuStep::Done => SimCpuStep::Done,
        };
        happened
    }

    fn commit(&self, conn: &mut Http1Connection) -> (Http1Events, SeekResult) {
        let len = self.bytes.len() as u32;
        let mut happened = 0;
        if self.have > 0 {
            happened |= match self.is_request {
                true => conn.commit_request_read(&self.draft),
                false => conn.commit_response_read(&self.draft),
            };
        }
        let direction = if self.is_request { &mut conn.rx } else { &mut conn.tx };
        let seek = direction.seek(self.seq, len);
        happened |= match self.is_request {
            true => conn.after_request_seek(),
            false => conn.after_response_seek(),
        };
        (happened, seek)
    }
}

#[test]
fn two_cpus_agree_where_http2_begins() {
    const FIRST: [u32; 2] = [1_000, 2_000];
    let mut ended = 0;
    // Each bit selects the CPU that takes the next step.
    for order in 0_u32..1 << 14 {
        let mut conn = Http1Connection::new(FIRST[0], FIRST[1]);
        let mut client = SimCpu::new(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", FIRST[0], true);
        let mut server = SimCpu::new(b"\0\0\0\x04\0\0\0\0\0", FIRST[1], false);
        let (mut handoff, mut happened) = (None, 0);
        for step in 0..28 {
            let is_client = order >> (step % 14) & 1 == 0;
            let one = if is_client { &mut client } else { &mut server };
            happened |= one.step(&mut conn, &mut handoff);
        }
        if client.next == SimCpuStep::Done && server.next == SimCpuStep::Done {
            ended += 1;
            assert_eq!((handoff, happened), (Some(FIRST), HTTP2), "{order:#b}");
        }
    }
    // Orders in which one CPU takes too few steps do not count.
    assert!(ended > 15_000, "{ended}");
}
