//! Pure: choice of a backend and packing of map words; the same code runs in the eBPF programs and in unit tests.

/// Nanoseconds of a second.
const SECOND_NS: u64 = 1_000_000_000;
/// Bits of [`SvcState`] for the offset of the list in `SLOTS`.
const OFFSET_BITS: u32 = 24;
/// Bits of [`SvcState`] for the length of the list.
const COUNT_BITS: u32 = 20;
/// Bits of [`SvcState`] for the number of stores, modulo 2¹⁶.
const GENERATION_BITS: u32 = 16;

/// Bits of [`SvcInfo`] for the list of activators.
const ACTIVATOR_LIST_BITS: u32 = 8;
/// Bits of [`SvcInfo`] for the affinity timeout.
const AFFINITY_BITS: u32 = 24;

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// Routing mode of a service: treatment of a connect to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum RoutingMode {
    /// Leaves the connect as it is. An untouched word also means this.
    Pass = 0,
    /// Picks a backend from the service's own list.
    PickBackend = 1,
    /// Picks from the list of activators, at the service's own port there.
    Activator = 2,
    /// Refuses the connect: with ECONNREFUSED, or with EPERM where the kernel leaves no other choice.
    Refuse = 3,
    /// Counts the connect and refuses it: a proof that the programs are in force.
    SelfTest = 4,
    /// Picks a random backend from the service's own list. With an [affinity timeout](SvcInfo::affinity_seconds) a
    /// client keeps its backend. Then, and with other protocols than TCP, the list is in the order of backend numbers.
    PickRandom = 5,
    /// Picks a backend like `PickBackend`, and a client keeps it for the [affinity timeout](SvcInfo::affinity_seconds)
    /// while it is usable. The list is in the order of backend numbers.
    PickWithAffinity = 6,
}

impl RoutingMode {
    /// Decodes four bits; unknown values pass, since in doubt a connect is left alone.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Self::PickBackend,
            2 => Self::Activator,
            3 => Self::Refuse,
            4 => Self::SelfTest,
            5 => Self::PickRandom,
            6 => Self::PickWithAffinity,
            _ => Self::Pass,
        }
    }
}

/// List and mode of one service id. One 64-bit store of it switches one address of a service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SvcState {
    /// Index in `SLOTS` of the list's first backend, below 2²⁴.
    pub offset: u32,
    /// Length of the list in backends, below 2²⁰.
    pub count: u32,
    /// Number of stores so far, wrapping.
    pub generation: u16,
    /// Treatment of a connect to the service.
    pub mode: RoutingMode,
}

impl SvcState {
    /// Encodes the word for `SVC_STATE`: offset, count, generation, mode, from the low end.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        (self.offset as u64 & mask(OFFSET_BITS))
            | (self.count as u64 & mask(COUNT_BITS)) << OFFSET_BITS
            | (self.generation as u64) << (OFFSET_BITS + COUNT_BITS)
            | (self.mode as u64) << (OFFSET_BITS + COUNT_BITS + GENERATION_BITS)
    }

    /// Decodes a word of `SVC_STATE`.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            offset: (word & mask(OFFSET_BITS)) as u32,
            count: (word >> OFFSET_BITS & mask(COUNT_BITS)) as u32,
            generation: (word >> (OFFSET_BITS + COUNT_BITS)) as u16,
            mode: RoutingMode::from_bits(
                (word >> (OFFSET_BITS + COUNT_BITS + GENERATION_BITS)) as u8,
            ),
        }
    }
}

/// Treatment of a service's connects besides its list: the target of those that find no pod, and the affinity of
/// clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SvcInfo {
    /// Service id of the list of activators.
    pub activators: u32,
    /// Time for which a client keeps its backend after its last connect, in seconds, below 2²⁴; 0: not at all. Counts in
    /// the modes [`PickRandom`](RoutingMode::PickRandom) and [`PickWithAffinity`](RoutingMode::PickWithAffinity) only.
    pub affinity_seconds: u32,
    /// Port of the service at the activators, network byte order; 0: none, and the connect goes on unchanged.
    pub port_be: u16,
}

impl SvcInfo {
    /// Encodes the word for `SVC_INFO`.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        (self.activators as u64 & mask(ACTIVATOR_LIST_BITS))
            | (self.affinity_seconds as u64 & mask(AFFINITY_BITS)) << ACTIVATOR_LIST_BITS
            | (self.port_be as u64) << (ACTIVATOR_LIST_BITS + AFFINITY_BITS)
    }

    /// Decodes a word of `SVC_INFO`.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            activators: (word & mask(ACTIVATOR_LIST_BITS)) as u32,
            affinity_seconds: (word >> ACTIVATOR_LIST_BITS & mask(AFFINITY_BITS)) as u32,
            port_be: (word >> (ACTIVATOR_LIST_BITS + AFFINITY_BITS)) as u16,
        }
    }
}

/// Words that a connect reads on its way to a backend: once before it copies the backend's fields, and once after.
///
/// Writers change one of these words, or the frontend's service id, before they reuse a backend that a list named, or
/// an entry of `SLOTS` for another service. So fields copied between two equal readings belong to this service, however
/// long the connect was preempted. Only a connect that sleeps through exactly 65,536 changes of one list, or a multiple,
/// could take the words for unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceReading {
    /// Service id that `FRONTENDS` gives for the address.
    pub service_id: u32,
    /// Word of the service id in `SVC_STATE`.
    pub state: u64,
    /// Word of the service id in `SVC_INFO`; 0 where no activator was chosen.
    pub info: u64,
    /// Word in `SVC_STATE` of the list of activators; 0 where none was chosen.
    pub activator_list: u64,
}

impl ServiceReading {
    /// Returns true if a second reading equals this one.
    #[inline(always)]
    pub const fn is_unchanged(&self, now: &Self) -> bool {
        self.service_id == now.service_id
            && self.state == now.state
            && self.info == now.info
            && self.activator_list == now.activator_list
    }
}

/// Returns an index below `count` from 32 random bits: multiply and shift, no division.
#[inline(always)]
pub const fn random_index(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

/// Returns two indexes below `count`, different when `count` is at least 2. `count` must not be 0.
///
/// The second index is the first plus 1 … count−1 places. It uses the same random bits, mixed once more (Knuth's
/// multiplicative constant, halves swapped), so that every pair is about equally frequent.
#[inline(always)]
pub const fn random_index_pair(random: u32, count: u32) -> (u32, u32) {
    let first = random_index(random, count);
    if count < 2 {
        return (first, first);
    }
    let mixed = random.wrapping_mul(0x9E37_79B1).rotate_left(16).wrapping_mul(0x85EB_CA6B);
    // Below 2 · count, so one subtraction replaces the modulo, which costs a division in eBPF.
    let second = first + 1 + random_index(mixed, count - 1);
    (first, if second >= count { second - count } else { second })
}

/// Load of one candidate backend, as this node knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendLoad {
    /// Open connections of this node to the backend.
    pub open_connections: u64,
    /// Requests in flight; [`UNKNOWN_IN_FLIGHT`] except for a pod on this node. It is no `Option`: without a value, the
    /// compiler would read an uninitialised word of the stack, which kernels before 6.3 refuse.
    pub in_flight: u64,
    /// True if the backend left a connect unanswered a moment ago: its node may be down.
    pub recently_unanswered: bool,
}

/// Value of a gauge that is not known. Gauges updated without a read stay near 0, so they never reach it.
pub const UNKNOWN_IN_FLIGHT: u64 = 1 << 63;

/// Returns true if the first of two candidates is at least as free as the second.
///
/// A doubtful candidate comes after one that is not. Requests in flight decide where both are known; open connections
/// decide otherwise, and between equals. Another CPU's subtraction may be visible before the addition it belongs to, so
/// a gauge below zero counts as zero.
#[inline(always)]
pub const fn prefers_first(first: BackendLoad, second: BackendLoad) -> bool {
    if first.recently_unanswered != second.recently_unanswered {
        return second.recently_unanswered;
    }
    if first.in_flight != UNKNOWN_IN_FLIGHT && second.in_flight != UNKNOWN_IN_FLIGHT {
        let (one, two) = (clamp_gauge(first.in_flight), clamp_gauge(second.in_flight));
        if one != two {
            return one < two;
        }
    }
    clamp_gauge(first.open_connections) <= clamp_gauge(second.open_connections)
}

/// Returns the time since a stamp, in ns. The stamp of another CPU may be later than `now_ns`, and then it is 0.
#[inline(always)]
pub const fn elapsed_ns(now_ns: u64, stamp_ns: u64) -> u64 {
    now_ns.saturating_sub(stamp_ns)
}

/// Returns true if a client that last connected at `connected_ns` keeps its backend for this timeout.
#[inline(always)]
pub const fn is_affinity_in_force(now_ns: u64, connected_ns: u64, affinity_seconds: u32) -> bool {
    elapsed_ns(now_ns, connected_ns) <= affinity_seconds as u64 * SECOND_NS
}

/// Returns a gauge that is updated without a read, as at least 0.
#[inline(always)]
pub const fn clamp_gauge(gauge: u64) -> u64 {
    if gauge as i64 > 0 { gauge } else { 0 }
}

/// Returns true if a request that has just begun must raise an event, where `in_flight` requests were in flight with
/// it. A threshold of 0 raises none. A request that begins and ends in one packet is never in flight, and
/// yet raises one at threshold 1 (idle pod).
#[inline(always)]
pub const fn should_raise_growth_event(threshold: u64, in_flight: u64) -> bool {
    threshold != 0 && (threshold == 1 || clamp_gauge(in_flight) >= threshold)
}

/// Returns true if sixteen address bytes, as four words in memory order, are `::ffff:a.b.c.d`.
#[inline(always)]
pub const fn is_ipv4_mapped(words: &[u32; 4]) -> bool {
    words[0] == 0 && words[1] == 0 && words[2] == IPV4_MAPPED_WORD
}

/// Returns the unspecified address of the family of an address, in memory order: `::`, or `::ffff:0.0.0.0` for a mapped
/// one. A connect to it leads to the client's own host.
#[inline(always)]
pub const fn unspecified_address(words: &[u32; 4]) -> [u32; 4] {
    let third = if is_ipv4_mapped(words) { IPV4_MAPPED_WORD } else { 0 };
    [0, 0, third, 0]
}

/// Third word of an IPv4-mapped address, in memory order.
pub const IPV4_MAPPED_WORD: u32 = 0xFFFF_u32.to_be();

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODES: [RoutingMode; 7] = [
        RoutingMode::Pass,
        RoutingMode::PickBackend,
        RoutingMode::Activator,
        RoutingMode::Refuse,
        RoutingMode::SelfTest,
        RoutingMode::PickRandom,
        RoutingMode::PickWithAffinity,
    ];

    fn load(open: u64, in_flight: Option<u64>) -> BackendLoad {
        BackendLoad {
            open_connections: open,
            in_flight: in_flight.unwrap_or(UNKNOWN_IN_FLIGHT),
            recently_unanswered: false,
        }
    }

    proptest! {
        #[test]
        fn a_state_survives_packing(
            offset in 0u32..1 << 24, count in 0u32..1 << 20, generation: u16, mode in 0usize..7,
        ) {
            let state = SvcState { offset, count, generation, mode: MODES[mode] };
            prop_assert_eq!(SvcState::unpack(state.pack()), state);
        }

        #[test]
        fn an_info_survives_packing(
            activators in 0u32..1 << 8, affinity_seconds in 0u32..1 << 24, port_be: u16,
        ) {
            let info = SvcInfo { activators, affinity_seconds, port_be };
            prop_assert_eq!(SvcInfo::unpack(info.pack()), info);
        }

        #[test]
        fn two_picks_are_in_range_and_different(random: u32, count in 1u32..1 << 20) {
            let (first, second) = random_index_pair(random, count);
            prop_assert!(first < count && second < count);
            prop_assert!(count == 1 || first != second);
        }

        #[test]
        fn one_of_two_backends_is_always_preferred(
            a: u64, b: u64, c: u64, d: u64, e: bool, f: bool,
        ) {
            let one = BackendLoad { recently_unanswered: e, ..load(a, Some(b)) };
            let two = BackendLoad { recently_unanswered: f, ..load(c, Some(d)) };
            prop_assert!(prefers_first(one, two) || prefers_first(two, one));
        }
    }

    /// State of a service's tables at one moment: service id of its address, its word, two entries of `SLOTS`, and
    /// the owner of each of two backends.
    #[derive(Clone, Copy)]
    struct ServiceTablesCase {
        service_id: u32,
        state: u64,
        slots: [usize; 2],
        backends: [BackendOwnerCase; 2],
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum BackendOwnerCase {
        Own,
        Others,
    }

    const BEGIN: ServiceTablesCase = ServiceTablesCase {
        service_id: 3,
        state: word(0, 1),
        slots: [0, 1],
        backends: [BackendOwnerCase::Own; 2],
    };

    const fn word(offset: u32, generation: u16) -> u64 {
        SvcState { offset, count: 1, generation, mode: RoutingMode::PickBackend }.pack()
    }

    /// Returns the state after each of these writes, without any quarantine between them.
    fn history(writes: &[fn(&mut ServiceTablesCase)]) -> Vec<ServiceTablesCase> {
        let mut all = vec![BEGIN];
        for write in writes {
            let mut next = *all.last().expect("it has a begin");
            write(&mut next);
            all.push(next);
        }
        all
    }

    /// Runs a connect through each way of being preempted between its five reads. Returns the owners of the backends
    /// copied between equal readings, and the number of foreign backends that the second reading rejected.
    fn outcomes(history: &[ServiceTablesCase]) -> (Vec<BackendOwnerCase>, usize) {
        let (mut taken, mut avoided) = (Vec::new(), 0);
        for ways in 0..history.len().pow(5) {
            let at = [0, 1, 2, 3, 4].map(|time| ways / history.len().pow(time) % history.len());
            let [service, state, slot, backend, again] = at.map(|at| &history[at]);
            if !at.is_sorted() || service.service_id != BEGIN.service_id {
                continue;
            }
            let read = |service_id, state| ServiceReading {
                service_id,
                state,
                info: 0,
                activator_list: 0,
            };
            let before = read(service.service_id, state.state);
            let offset = SvcState::unpack(before.state).offset as usize;
            let copied = backend.backends[slot.slots[offset]];
            if before.is_unchanged(&read(again.service_id, again.state)) {
                taken.push(copied);
            } else {
                avoided += usize::from(copied == BackendOwnerCase::Others);
            }
        }
        (taken, avoided)
    }

    #[test]
    fn what_is_copied_between_two_same_readings_is_the_services_own() {
        let moved: &[fn(&mut ServiceTablesCase)] = &[
            |it| it.state = word(1, 2),
            |it| it.backends[0] = BackendOwnerCase::Others,
            |it| it.slots[0] = 1,
            |it| it.state = word(0, 3),
            |it| (it.slots[1], it.backends[0]) = (0, BackendOwnerCase::Others),
        ];
        // Its service id is given to another frontend at once, whose word happens to be the same.
        let removed: &[fn(&mut ServiceTablesCase)] = &[
            |it| it.service_id = 4,
            |it| it.backends[0] = BackendOwnerCase::Others,
            |it| it.state = word(1, 9),
            |it| it.state = word(0, 1),
        ];
        // An entry of the list in force is given to another backend of the service.
        let edited: &[fn(&mut ServiceTablesCase)] = &[
            |it| it.slots[0] = 1,
            |it| it.state = word(0, 2),
            |it| it.backends[0] = BackendOwnerCase::Others,
        ];
        for writes in [moved, removed, edited] {
            let (taken, avoided) = outcomes(&history(writes));
            assert!(
                taken.contains(&BackendOwnerCase::Own)
                    && !taken.contains(&BackendOwnerCase::Others)
            );
            assert_ne!(avoided, 0, "without the second reading they would have been taken");
        }
    }

    #[test]
    fn a_reading_differs_by_any_of_its_words() {
        let read = ServiceReading { service_id: 3, state: 7, info: 5, activator_list: 9 };
        assert!(read.is_unchanged(&read));
        let others = [
            ServiceReading { service_id: 4, ..read },
            ServiceReading { state: 8, ..read },
            ServiceReading { info: 6, ..read },
            ServiceReading { activator_list: 10, ..read },
        ];
        assert!(others.iter().all(|other| !read.is_unchanged(other)));
    }

    #[test]
    fn an_untouched_word_passes() {
        assert_eq!(SvcState::unpack(0).mode, RoutingMode::Pass);
    }

    #[test]
    fn an_unknown_mode_passes() {
        assert_eq!(SvcState::unpack(15 << 60).mode, RoutingMode::Pass);
    }

    #[test]
    fn every_pair_comes_up_about_equally_often() {
        const COUNT: usize = 7;
        let mut counts = [[0u32; COUNT]; COUNT];
        let mut random = 1u32;
        for _ in 0..420_000 {
            // xorshift32: any good source of 32 bits can replace the kernel's.
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let (first, second) = random_index_pair(random, COUNT as u32);
            counts[first as usize][second as usize] += 1;
        }
        for (first, row) in counts.iter().enumerate() {
            for (second, &count) in row.iter().enumerate() {
                if first == second {
                    assert_eq!(count, 0);
                } else {
                    assert!((9_000..11_000).contains(&count), "{first},{second}: {count}");
                }
            }
        }
    }

    #[test]
    fn the_exact_gauge_decides_between_local_pods() {
        let busy = load(0, Some(3));
        let free = load(9, Some(0));
        assert!(prefers_first(free, busy) && !prefers_first(busy, free));
    }

    #[test]
    fn open_connections_decide_when_one_pod_is_elsewhere() {
        let local = load(2, Some(0));
        let remote = load(1, None);
        assert!(prefers_first(remote, local) && !prefers_first(local, remote));
    }

    #[test]
    fn an_unanswering_backend_comes_last_however_free() {
        let doubtful = BackendLoad { recently_unanswered: true, ..load(0, Some(0)) };
        let busy = load(9, Some(9));
        assert!(prefers_first(busy, doubtful) && !prefers_first(doubtful, busy));
        assert!(prefers_first(doubtful, doubtful));
    }

    #[test]
    fn a_client_keeps_its_backend_until_its_timeout_and_by_a_later_stamp_too() {
        assert!(is_affinity_in_force(SECOND_NS, SECOND_NS, 1));
        assert!(is_affinity_in_force(2 * SECOND_NS, SECOND_NS, 1));
        assert!(!is_affinity_in_force(2 * SECOND_NS + 1, SECOND_NS, 1));
        assert!(is_affinity_in_force(SECOND_NS, SECOND_NS + 1, 1), "the stamp of another CPU");
    }

    #[test]
    fn a_gauge_below_zero_counts_as_zero() {
        let below_zero = load(u64::MAX, None);
        assert!(prefers_first(below_zero, load(0, None)));
    }

    #[test]
    fn growth_beyond_what_was_reported_raises_an_event() {
        assert!(
            !should_raise_growth_event(0, 0) && !should_raise_growth_event(0, 50),
            "none is asked for"
        );
        assert!(
            should_raise_growth_event(1, 1)
                && should_raise_growth_event(1, 0)
                && should_raise_growth_event(1, u64::MAX),
            "any request of an idle pod"
        );
        assert!(
            !should_raise_growth_event(11, 10)
                && should_raise_growth_event(11, 11)
                && should_raise_growth_event(11, 12)
        );
        assert!(!should_raise_growth_event(11, u64::MAX), "a gauge below zero counts as zero");
    }

    /// Returns the words of an IPv6 address, in memory order.
    fn words_of(address: core::net::Ipv6Addr) -> [u32; 4] {
        let octets = address.octets();
        [0, 1, 2, 3].map(|at| {
            u32::from_ne_bytes([
                octets[at * 4],
                octets[at * 4 + 1],
                octets[at * 4 + 2],
                octets[at * 4 + 3],
            ])
        })
    }

    #[test]
    fn mapped_addresses_are_known_by_their_words() {
        let mapped = core::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped();
        assert!(is_ipv4_mapped(&words_of(mapped)));
        assert!(!is_ipv4_mapped(&[0, 0, 0, 1]));
    }

    #[test]
    fn the_unspecified_address_is_of_the_family_of_the_address() {
        use core::net::{Ipv4Addr, Ipv6Addr};
        let mapped = |it: Ipv4Addr| words_of(it.to_ipv6_mapped());
        let ipv6 = Ipv6Addr::new(0xFD96, 0, 0, 0, 0, 0, 0, 1);
        assert_eq!(
            unspecified_address(&mapped(Ipv4Addr::new(10, 96, 0, 1))),
            mapped(Ipv4Addr::UNSPECIFIED)
        );
        assert_eq!(unspecified_address(&words_of(ipv6)), words_of(Ipv6Addr::UNSPECIFIED));
    }
}
