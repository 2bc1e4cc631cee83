//! Pure: a connection that is established while a packet of it is processed on another CPU, in every order of steps.
//!
//! Where connections begin without storage, the packet may find the socket before `handle_established` runs for it. The
//! model has the steps of that function (`ebpf/src/sock_ops.rs`), and of `ingress` and `ingress_keep`
//! (`ebpf/src/count.rs`). For a connection to an opaque port from the node itself, "read" means that its request begins.
//! A step is one access to what both share, or all that happens under the connection's lock. All
//! CPUs see the steps in the same order.

/// Content that both programs share.
#[derive(Clone, Copy, Debug, Default)]
struct SharedSocket {
    /// True once the socket has left the state SYN_RECV.
    is_established: bool,
    storage: Option<StoredConnection>,
    /// True if the packet's segment is in `KEPT`.
    is_buffered: bool,
    /// True once a program has read the segment.
    is_read: bool,
}

/// Storage of the socket, as far as it decides about the packet.
#[derive(Clone, Copy, Debug, Default)]
struct StoredConnection {
    /// True if it is a copy of the listener's, `CONN_LISTENS` included.
    is_copy: bool,
    has_pod_slot: bool,
    /// Flag `CONN_UNCOUNTED`.
    is_uncounted: bool,
}

/// Connection that is established.
#[derive(Clone, Copy, Debug)]
struct ConnectionKind {
    /// True if it brings requests to a pod of Rouse.
    counts: bool,
    is_fast_open: bool,
    /// True on a kernel before 5.15, where a connection begins with a copy of its listener's storage.
    begins_with_copy: bool,
}

impl ConnectionKind {
    /// Returns the socket when packets begin to find it.
    fn new_socket(self) -> SharedSocket {
        let copy = StoredConnection { is_copy: true, ..StoredConnection::default() };
        SharedSocket { storage: self.begins_with_copy.then_some(copy), ..SharedSocket::default() }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpeningStep {
    LookUp,
    Create,
    Open,
    ReadBuffered,
    LeaveState,
    Ended,
}

/// `handle_established`, and the kernel's change of state behind it.
#[derive(Clone, Copy, Debug)]
struct OpeningRun {
    kind: ConnectionKind,
    step: OpeningStep,
    is_found: bool,
}

impl OpeningRun {
    fn new(kind: ConnectionKind) -> Self {
        Self { kind, step: OpeningStep::LookUp, is_found: false }
    }

    /// Executes the next step. Returns false if there is none.
    fn advance(&mut self, shared: &mut SharedSocket) -> bool {
        let ConnectionKind { counts, is_fast_open, begins_with_copy } = self.kind;
        self.step = match self.step {
            OpeningStep::LookUp => {
                self.is_found = shared.storage.is_some();
                OpeningStep::Create
            }
            OpeningStep::Create if self.is_found => OpeningStep::Open,
            OpeningStep::Create if counts || (is_fast_open && !begins_with_copy) => {
                // The packet may have created it since the look-up.
                shared.storage.get_or_insert_default();
                OpeningStep::Open
            }
            OpeningStep::Create => OpeningStep::LeaveState,
            OpeningStep::Open => {
                shared.storage = Some(StoredConnection {
                    is_copy: false,
                    has_pod_slot: counts,
                    is_uncounted: !counts,
                });
                if counts { OpeningStep::ReadBuffered } else { OpeningStep::LeaveState }
            }
            OpeningStep::ReadBuffered => {
                shared.is_read |= shared.is_buffered;
                OpeningStep::LeaveState
            }
            OpeningStep::LeaveState => {
                shared.is_established = true;
                OpeningStep::Ended
            }
            OpeningStep::Ended => return false,
        };
        true
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PacketStep {
    First,
    Second,
    Create,
    ReadSlot,
    CheckSlot,
    Buffer,
    CheckSlotAgain,
    Read,
    Ended,
}

/// `ingress` and `ingress_keep` for one packet with data.
#[derive(Clone, Copy, Debug)]
struct PacketRun {
    step: PacketStep,
    begins_with_copy: bool,
    /// True in a variant that looks the storage up before it reads the socket's state.
    looks_up_first: bool,
    is_opening: bool,
    is_found: bool,
}

impl PacketRun {
    fn new(kind: ConnectionKind) -> Self {
        Self {
            step: PacketStep::First,
            begins_with_copy: kind.begins_with_copy,
            looks_up_first: false,
            is_opening: false,
            is_found: false,
        }
    }

    /// Executes the next step. Returns false if there is none.
    fn advance(&mut self, shared: &mut SharedSocket) -> bool {
        let stored = shared.storage.unwrap_or_default();
        self.step = match self.step {
            PacketStep::First => {
                self.read_state_or_storage(shared, self.looks_up_first);
                PacketStep::Second
            }
            PacketStep::Second => {
                self.read_state_or_storage(shared, !self.looks_up_first);
                match (self.is_found, self.is_opening) {
                    (true, _) => PacketStep::ReadSlot,
                    (false, true) => PacketStep::Create,
                    (false, false) => PacketStep::Ended,
                }
            }
            PacketStep::Create => {
                shared.storage.get_or_insert_default();
                PacketStep::Buffer
            }
            PacketStep::ReadSlot if stored.has_pod_slot => PacketStep::Read,
            PacketStep::ReadSlot if stored.is_copy => PacketStep::Buffer,
            PacketStep::ReadSlot => PacketStep::CheckSlot,
            PacketStep::CheckSlot if stored.has_pod_slot => PacketStep::Read,
            PacketStep::CheckSlot if self.is_opening && !stored.is_uncounted => PacketStep::Buffer,
            PacketStep::CheckSlot => PacketStep::Ended,
            PacketStep::Buffer => {
                shared.is_buffered = true;
                PacketStep::CheckSlotAgain
            }
            PacketStep::CheckSlotAgain if stored.has_pod_slot => PacketStep::Read,
            PacketStep::CheckSlotAgain => PacketStep::Ended,
            PacketStep::Read => {
                shared.is_read = true;
                PacketStep::Ended
            }
            PacketStep::Ended => return false,
        };
        true
    }

    fn read_state_or_storage(&mut self, shared: &SharedSocket, looks_up: bool) {
        if looks_up {
            self.is_found = shared.storage.is_some();
        } else {
            self.is_opening = !self.begins_with_copy && !shared.is_established;
        }
    }
}

/// Runs both in every order of their steps, and calls `check` with the end of each.
fn run_in_every_order(
    shared: SharedSocket,
    opening: OpeningRun,
    packet: PacketRun,
    check: &mut impl FnMut(SharedSocket),
) {
    let (mut after_opening, mut next_opening) = (shared, opening);
    let opens = next_opening.advance(&mut after_opening);
    if opens {
        run_in_every_order(after_opening, next_opening, packet, check);
    }
    let (mut after_packet, mut next_packet) = (shared, packet);
    let reads = next_packet.advance(&mut after_packet);
    if reads {
        run_in_every_order(after_packet, opening, next_packet, check);
    }
    if !opens && !reads {
        check(shared);
    }
}

/// Runs a packet alone. Returns the socket after it.
fn run_packet(mut shared: SharedSocket, mut packet: PacketRun) -> SharedSocket {
    while packet.advance(&mut shared) {}
    shared
}

#[test]
fn a_connection_that_counts_reads_the_packet_in_every_order() {
    for begins_with_copy in [false, true] {
        let kind = ConnectionKind { counts: true, is_fast_open: false, begins_with_copy };
        let (mut orders, mut buffered) = (0, 0);
        let mut check = |shared: SharedSocket| {
            assert!(shared.is_read, "{kind:?}: {shared:?}");
            (orders, buffered) = (orders + 1, buffered + u32::from(shared.is_buffered));
        };
        let (opening, packet) = (OpeningRun::new(kind), PacketRun::new(kind));
        run_in_every_order(kind.new_socket(), opening, packet, &mut check);
        assert!(0 < buffered && buffered < orders, "{buffered} of {orders}: both ways are taken");
    }
}

#[test]
fn a_connection_that_does_not_count_has_storage_only_if_a_packet_overtook_it() {
    let kind = ConnectionKind { counts: false, is_fast_open: false, begins_with_copy: false };
    let mut without_storage = 0;
    let mut check = |shared: SharedSocket| {
        assert!(!shared.is_read, "{shared:?}");
        assert_eq!(shared.storage.is_some(), shared.is_buffered, "{shared:?}");
        without_storage += u32::from(shared.storage.is_none());
        // What was created for the one packet lets no later packet be buffered.
        let later = run_packet(SharedSocket { is_buffered: false, ..shared }, PacketRun::new(kind));
        assert!(!later.is_buffered && !later.is_read, "{later:?}");
    };
    let (opening, packet) = (OpeningRun::new(kind), PacketRun::new(kind));
    run_in_every_order(kind.new_socket(), opening, packet, &mut check);
    assert!(without_storage > 0);
}

/// After a SYN with data the connection stays in its state until the client's next segment.
#[test]
fn packets_of_an_uncounted_fast_open_are_not_buffered_in_its_long_handshake() {
    let kind = ConnectionKind { counts: false, is_fast_open: true, begins_with_copy: false };
    let (mut shared, mut opening) = (kind.new_socket(), OpeningRun::new(kind));
    while opening.step != OpeningStep::LeaveState {
        opening.advance(&mut shared);
    }
    let after = run_packet(shared, PacketRun::new(kind));
    assert!(!after.is_buffered && !after.is_established, "{after:?}");
}

#[test]
fn a_look_up_before_the_state_is_read_would_lose_the_packet() {
    let kind = ConnectionKind { counts: true, is_fast_open: false, begins_with_copy: false };
    let mut lost = 0;
    let mut check = |shared: SharedSocket| lost += u32::from(!shared.is_read);
    let packet = PacketRun { looks_up_first: true, ..PacketRun::new(kind) };
    run_in_every_order(kind.new_socket(), OpeningRun::new(kind), packet, &mut check);
    assert!(lost > 0);
}
