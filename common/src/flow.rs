//! Pure: choice and packing, the same code in the kernel half and in unit tests.

/// Bits of [`SvcState`]: where the list begins in `SLOTS`.
const OFFSET_BITS: u32 = 24;
/// Bits of [`SvcState`]: how long the list is.
const COUNT_BITS: u32 = 20;
/// Bits of [`SvcState`]: how often it was stored.
const GENERATION_BITS: u32 = 16;

const fn mask(bits: u32) -> u64 {
    (1 << bits) - 1
}

/// What a connect to a service meets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Mode {
    /// Leave the connect as it is. Also what an untouched word means.
    Pass = 0,
    /// Pick from the service's own list.
    Serve = 1,
    /// Pick from the list of activators, at the service's own port there.
    Activator = 2,
    /// Refuse with ECONNREFUSED.
    Refuse = 3,
    /// Count it and refuse: proof that the programs are in force.
    Canary = 4,
}

impl Mode {
    /// The mode behind four bits; unknown ones pass, since any doubt leaves the connect alone.
    #[inline(always)]
    pub const fn from_bits(bits: u8) -> Self {
        match bits {
            1 => Self::Serve,
            2 => Self::Activator,
            3 => Self::Refuse,
            4 => Self::Canary,
            _ => Self::Pass,
        }
    }
}

/// One service's list and mode. One 64-bit store of it switches the service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SvcState {
    /// First slot of the list, below 2²⁴.
    pub offset: u32,
    /// Length of the list, below 2²⁰.
    pub count: u32,
    /// Grows by one with each store, wrapping.
    pub generation: u16,
    /// What a connect meets.
    pub mode: Mode,
}

impl SvcState {
    /// The word as it stands in `SVC_STATE`: offset, count, generation, mode, from the low end.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        (self.offset as u64 & mask(OFFSET_BITS))
            | (self.count as u64 & mask(COUNT_BITS)) << OFFSET_BITS
            | (self.generation as u64) << (OFFSET_BITS + COUNT_BITS)
            | (self.mode as u64) << (OFFSET_BITS + COUNT_BITS + GENERATION_BITS)
    }

    /// Reads a word back.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self {
            offset: (word & mask(OFFSET_BITS)) as u32,
            count: (word >> OFFSET_BITS & mask(COUNT_BITS)) as u32,
            generation: (word >> (OFFSET_BITS + COUNT_BITS)) as u16,
            mode: Mode::from_bits((word >> (OFFSET_BITS + COUNT_BITS + GENERATION_BITS)) as u8),
        }
    }
}

/// Where a service's connects go without a pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SvcInfo {
    /// Service number of the list of activators.
    pub activators: u32,
    /// The service's own port there, network byte order.
    pub port_be: u16,
}

impl SvcInfo {
    /// The word as it stands in `SVC_INFO`.
    #[inline(always)]
    pub const fn pack(self) -> u64 {
        self.activators as u64 | (self.port_be as u64) << 32
    }

    /// Reads a word back.
    #[inline(always)]
    pub const fn unpack(word: u64) -> Self {
        Self { activators: word as u32, port_be: (word >> 32) as u16 }
    }
}

/// What a connect reads on its way to a backend: once before it copies what it needs of it, and once behind.
///
/// Writers change one of these words, or what an address leads to, before they use a slot or a backend again that a list
/// named. So what was copied between two readings that are the same is the backend of this service, however long the
/// connect was kept from running.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// The number that the address leads to.
    pub service: u32,
    /// The service's word in `SVC_STATE`.
    pub state: u64,
    /// Its word in `SVC_INFO`; 0 where no activator was chosen.
    pub info: u64,
    /// The word of the list of activators; 0 where none was chosen.
    pub list: u64,
}

impl Read {
    /// Whether nothing has changed since.
    #[inline(always)]
    pub const fn is_same(&self, now: &Self) -> bool {
        self.service == now.service
            && self.state == now.state
            && self.info == now.info
            && self.list == now.list
    }
}

/// An index below `count` from 32 random bits: multiply and shift, no division.
#[inline(always)]
pub const fn index(random: u32, count: u32) -> u32 {
    ((random as u64 * count as u64) >> 32) as u32
}

/// Two indexes below `count`, different when `count` is at least 2. `count` must not be 0.
///
/// The second is the first plus 1 … count−1 places, from the same random bits mixed once more (Knuth's
/// multiplicative constant, halves swapped), so that every pair comes up about equally often.
#[inline(always)]
pub const fn two(random: u32, count: u32) -> (u32, u32) {
    let first = index(random, count);
    if count < 2 {
        return (first, first);
    }
    let mixed = random.wrapping_mul(0x9E37_79B1).rotate_left(16).wrapping_mul(0x85EB_CA6B);
    let second = first + 1 + index(mixed, count - 1);
    (first, if second >= count { second - count } else { second })
}

/// How busy one pick is, as this node knows it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// This node's open connections to it.
    pub open: u64,
    /// Requests in flight; [`UNKNOWN`] but of a pod on this node. No `Option`: without a value, the compiler would read a
    /// word of the stack that was never written, and before 6.3 the kernel refuses that.
    pub in_flight: u64,
    /// Whether it left a connect unanswered a moment ago: its node may be gone.
    pub doubtful: bool,
}

/// A gauge that nobody knows: blindly kept ones stay near 0.
pub const UNKNOWN: u64 = 1 << 63;

/// Whether the first of two picks is at least as free as the second.
///
/// One in doubt comes after one that is not. The exact gauge decides where both have one; open connections decide
/// otherwise and between equals. Blind adds on several CPUs may be seen before their counterpart, so a gauge below zero
/// counts as zero.
#[inline(always)]
pub const fn prefers_first(first: Load, second: Load) -> bool {
    if first.doubtful != second.doubtful {
        return second.doubtful;
    }
    if first.in_flight != UNKNOWN && second.in_flight != UNKNOWN {
        let (one, two) = (clamp(first.in_flight), clamp(second.in_flight));
        if one != two {
            return one < two;
        }
    }
    clamp(first.open) <= clamp(second.open)
}

/// A blindly kept gauge, at least 0.
#[inline(always)]
pub const fn clamp(gauge: u64) -> u64 {
    if gauge as i64 > 0 { gauge } else { 0 }
}

/// Whether a request that has just begun is news, where so many were in flight behind it: an event is asked for from
/// `armed` on; 0 asks for none. What begins and ends in one packet is never in flight, and yet news of an idle pod (1).
#[inline(always)]
pub const fn is_news(armed: u64, in_flight: u64) -> bool {
    armed != 0 && (armed == 1 || clamp(in_flight) >= armed)
}

/// Whether sixteen address bytes, as four words in memory order, are `::ffff:a.b.c.d`.
#[inline(always)]
pub const fn is_mapped(words: &[u32; 4]) -> bool {
    words[0] == 0 && words[1] == 0 && words[2] == MAPPED
}

/// Third word of a mapped address, as it stands in memory.
pub const MAPPED: u32 = 0xFFFF_u32.to_be();

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MODES: [Mode; 5] = [Mode::Pass, Mode::Serve, Mode::Activator, Mode::Refuse, Mode::Canary];

    fn load(open: u64, in_flight: Option<u64>) -> Load {
        Load { open, in_flight: in_flight.unwrap_or(UNKNOWN), doubtful: false }
    }

    proptest! {
        #[test]
        fn a_state_survives_packing(
            offset in 0u32..1 << 24, count in 0u32..1 << 20, generation: u16, mode in 0usize..5,
        ) {
            let state = SvcState { offset, count, generation, mode: MODES[mode] };
            prop_assert_eq!(SvcState::unpack(state.pack()), state);
        }

        #[test]
        fn an_info_survives_packing(activators: u32, port_be: u16) {
            let info = SvcInfo { activators, port_be };
            prop_assert_eq!(SvcInfo::unpack(info.pack()), info);
        }

        #[test]
        fn two_picks_are_in_range_and_different(random: u32, count in 1u32..1 << 20) {
            let (first, second) = two(random, count);
            prop_assert!(first < count && second < count);
            prop_assert!(count == 1 || first != second);
        }

        #[test]
        fn preference_is_never_mutual_dislike(
            a: u64, b: u64, c: u64, d: u64, e: bool, f: bool,
        ) {
            let one = Load { doubtful: e, ..load(a, Some(b)) };
            let two = Load { doubtful: f, ..load(c, Some(d)) };
            prop_assert!(prefers_first(one, two) || prefers_first(two, one));
        }
    }

    /// One moment of a service's tables: what its address leads to, its word, two slots, and whose each of two backends is.
    #[derive(Clone, Copy)]
    struct Moment {
        service: u32,
        state: u64,
        slots: [usize; 2],
        backends: [Whose; 2],
    }

    #[derive(Clone, Copy, Debug, PartialEq)]
    enum Whose {
        Own,
        Others,
    }

    const BEGIN: Moment =
        Moment { service: 3, state: word(0, 1), slots: [0, 1], backends: [Whose::Own; 2] };

    const fn word(offset: u32, generation: u16) -> u64 {
        SvcState { offset, count: 1, generation, mode: Mode::Serve }.pack()
    }

    /// The moments after each of these writes, without any rest between them.
    fn history(writes: &[fn(&mut Moment)]) -> Vec<Moment> {
        let mut all = vec![BEGIN];
        for write in writes {
            let mut next = *all.last().expect("it has a begin");
            write(&mut next);
            all.push(next);
        }
        all
    }

    /// Each way in which a connect may be kept from running between the five times that it reads: of those that found
    /// nothing changed, whose backends they copied; and how many of the others copied another's.
    fn outcomes(history: &[Moment]) -> (Vec<Whose>, usize) {
        let (mut taken, mut avoided) = (Vec::new(), 0);
        for ways in 0..history.len().pow(5) {
            let at = [0, 1, 2, 3, 4].map(|time| ways / history.len().pow(time) % history.len());
            let [service, state, slot, backend, again] = at.map(|at| &history[at]);
            if !at.is_sorted() || service.service != BEGIN.service {
                continue;
            }
            let read = |service, state| Read { service, state, info: 0, list: 0 };
            let before = read(service.service, state.state);
            let offset = SvcState::unpack(before.state).offset as usize;
            let copied = backend.backends[slot.slots[offset]];
            if before.is_same(&read(again.service, again.state)) {
                taken.push(copied);
            } else {
                avoided += usize::from(copied == Whose::Others);
            }
        }
        (taken, avoided)
    }

    #[test]
    fn what_is_copied_between_two_same_readings_is_the_services_own() {
        let moved: &[fn(&mut Moment)] = &[
            |it| it.state = word(1, 2),
            |it| it.backends[0] = Whose::Others,
            |it| it.slots[0] = 1,
            |it| it.state = word(0, 3),
            |it| (it.slots[1], it.backends[0]) = (0, Whose::Others),
        ];
        // Its number is another's at once, whose word happens to be the same.
        let removed: &[fn(&mut Moment)] = &[
            |it| it.service = 4,
            |it| it.backends[0] = Whose::Others,
            |it| it.state = word(1, 9),
            |it| it.state = word(0, 1),
        ];
        for writes in [moved, removed] {
            let (taken, avoided) = outcomes(&history(writes));
            assert!(taken.contains(&Whose::Own) && !taken.contains(&Whose::Others));
            assert_ne!(avoided, 0, "without the second reading they would have been taken");
        }
    }

    #[test]
    fn a_reading_differs_by_any_of_its_words() {
        let read = Read { service: 3, state: 7, info: 5, list: 9 };
        assert!(read.is_same(&read));
        let others = [
            Read { service: 4, ..read },
            Read { state: 8, ..read },
            Read { info: 6, ..read },
            Read { list: 10, ..read },
        ];
        assert!(others.iter().all(|other| !read.is_same(other)));
    }

    #[test]
    fn an_untouched_word_passes() {
        assert_eq!(SvcState::unpack(0).mode, Mode::Pass);
    }

    #[test]
    fn an_unknown_mode_passes() {
        assert_eq!(SvcState::unpack(15 << 60).mode, Mode::Pass);
    }

    #[test]
    fn every_pair_comes_up_about_equally_often() {
        const COUNT: usize = 7;
        let mut seen = [[0u32; COUNT]; COUNT];
        let mut random = 1u32;
        for _ in 0..420_000 {
            // xorshift32: any good source of 32 bits stands for the kernel's.
            random ^= random << 13;
            random ^= random >> 17;
            random ^= random << 5;
            let (first, second) = two(random, COUNT as u32);
            seen[first as usize][second as usize] += 1;
        }
        for (first, row) in seen.iter().enumerate() {
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
        let here = load(2, Some(0));
        let there = load(1, None);
        assert!(prefers_first(there, here) && !prefers_first(here, there));
    }

    #[test]
    fn who_left_a_connect_unanswered_comes_last_however_free() {
        let doubtful = Load { doubtful: true, ..load(0, Some(0)) };
        let busy = load(9, Some(9));
        assert!(prefers_first(busy, doubtful) && !prefers_first(doubtful, busy));
        assert!(prefers_first(doubtful, doubtful));
    }

    #[test]
    fn a_gauge_below_zero_counts_as_zero() {
        let odd = load(u64::MAX, None);
        assert!(prefers_first(odd, load(0, None)));
    }

    #[test]
    fn growth_beyond_what_was_reported_is_news() {
        assert!(!is_news(0, 0) && !is_news(0, 50), "none is asked for");
        assert!(
            is_news(1, 1) && is_news(1, 0) && is_news(1, u64::MAX),
            "any request of an idle pod"
        );
        assert!(!is_news(11, 10) && is_news(11, 11) && is_news(11, 12));
        assert!(!is_news(11, u64::MAX), "a gauge below zero counts as zero");
    }

    #[test]
    fn mapped_addresses_are_known_by_their_words() {
        let mapped = core::net::Ipv4Addr::new(10, 0, 0, 1).to_ipv6_mapped().octets();
        let words = [0, 1, 2, 3].map(|at| {
            u32::from_ne_bytes([
                mapped[at * 4],
                mapped[at * 4 + 1],
                mapped[at * 4 + 2],
                mapped[at * 4 + 3],
            ])
        });
        assert!(is_mapped(&words));
        assert!(!is_mapped(&[0, 0, 0, 1]));
    }
}
