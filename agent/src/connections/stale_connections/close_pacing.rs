//! Pure: pacing of the closes of each client, which notices one close before the next.
//!
//! Many libraries send a request again only once, for example the JDK's client. If several connections of a pool close in
//! the same moment, a client that waits for a processor notices none of these closes. Its request then meets a closed
//! connection, and so does its only other attempt.

use std::{
    collections::BTreeMap,
    net::IpAddr,
    time::{Duration, Instant},
};

/// Time from a close to the next one of the same client. In it a client of a busy machine gets a processor, and takes the
/// closed connection from its pool. Eight connections still close in less than half a second.
pub(super) const CLOSE_PAUSE: Duration = Duration::from_millis(50);
/// One part in this number of a client's due connections closes at a time. So eight close one by one, and 1,000 in 41
/// steps: a pod that is about to stop waits for two seconds only.
const CLOSE_DIVISOR: usize = 8;
/// Most connections of a busy client with which the usual pause follows each close. With more the pause is shorter by their
/// number. Otherwise 1,000 of them would close in 50 s: longer than the usual grace period of a pod.
const USUAL_PACE_MAX: usize = 40;

/// Times before which no further connection of a client is closed, for the clients of all draining pods.
#[derive(Debug, Default)]
pub(super) struct ClosePacing {
    /// Next moment of each client with a close of late.
    next_moments: BTreeMap<IpAddr, Instant>,
    /// Number of lists that were rotated.
    rotations: u32,
}

impl ClosePacing {
    /// Returns the number of a client's connections that may be closed now, of those that are due.
    pub(super) fn allowed(&self, now: Instant, client: IpAddr, due_count: usize) -> usize {
        if self.is_paused(now, client) { 0 } else { due_count.div_ceil(CLOSE_DIVISOR) }
    }

    fn is_paused(&self, now: Instant, client: IpAddr) -> bool {
        self.next_moment(client).is_some_and(|moment| now < moment)
    }

    /// Returns the time before which no connection of a client is closed. It may be over; `None`: there was no close of
    /// late.
    pub(super) fn next_moment(&self, client: IpAddr) -> Option<Instant> {
        self.next_moments.get(&client).copied()
    }

    /// Selects the due connections that may be closed now. Of each client these are the first ones.
    pub(super) fn select<T>(
        &self,
        now: Instant,
        mut due: Vec<T>,
        client_of: impl Fn(&T) -> IpAddr,
    ) -> Vec<T> {
        let mut counts = BTreeMap::<IpAddr, usize>::new();
        due.iter().for_each(|it| *counts.entry(client_of(it)).or_default() += 1);
        for (client, count) in &mut counts {
            *count = self.allowed(now, *client, *count);
        }
        due.retain(|it| {
            let Some(left) = counts.get_mut(&client_of(it)) else { return false };
            let is_selected = *left > 0;
            *left = left.saturating_sub(1);
            is_selected
        });
        due
    }

    /// Selects all due connections of the clients whose next moment is over.
    pub(super) fn select_all<T>(
        &self,
        now: Instant,
        mut due: Vec<T>,
        client_of: impl Fn(&T) -> IpAddr,
    ) -> Vec<T> {
        due.retain(|it| !self.is_paused(now, client_of(it)));
        due
    }

    /// Moves another connection to the begin of a list, each time. The first ones of a list may be spared at each attempt,
    /// such as those with a response that the client never reads. They must not keep the others from their turn.
    pub(super) fn rotate<T>(&mut self, due: &mut [T]) {
        self.rotations = self.rotations.wrapping_add(1);
        if !due.is_empty() {
            due.rotate_left(scatter(self.rotations) as usize % due.len());
        }
    }

    /// Records that connections of these clients were closed. Forgets the clients whose moments are over.
    pub(super) fn record_closed(
        &mut self,
        now: Instant,
        clients: impl IntoIterator<Item = IpAddr>,
    ) {
        self.record_pauses(now, clients.into_iter().map(|client| (client, CLOSE_PAUSE)));
    }

    /// Records that connections of these clients were closed, with the pause after the closes of each. Forgets the clients
    /// whose moments are over.
    pub(super) fn record_pauses(
        &mut self,
        now: Instant,
        pauses: impl IntoIterator<Item = (IpAddr, Duration)>,
    ) {
        self.next_moments.retain(|_, moment| *moment > now);
        self.next_moments.extend(pauses.into_iter().map(|(client, pause)| (client, now + pause)));
    }
}

/// Returns the pause after `closed` closes of a client whose connections are never idle for long. `known` is the number of
/// its connections to draining addresses: of a large pool, too, only few are due at a time.
pub(super) fn busy_pause(closed: usize, known: usize) -> Duration {
    // A scan may have found meanwhile that none is left.
    let known = known.max(1);
    let part = closed.saturating_mul(USUAL_PACE_MAX).min(known);
    CLOSE_PAUSE * part as u32 / known as u32
}

/// Scatters a number over all numbers. A rhythm in which lists of several clients are rotated must not bring the same
/// begin again and again. The steps are the finalizer of MurmurHash3.
fn scatter(number: u32) -> u32 {
    let number = (number ^ number >> 16).wrapping_mul(0x85EB_CA6B);
    let number = (number ^ number >> 13).wrapping_mul(0xC2B2_AE35);
    number ^ number >> 16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(host: u8) -> IpAddr {
        [10, 0, 0, host].into()
    }

    /// Closes all that is allowed, in steps of [`CLOSE_PAUSE`]. Returns the number of closes in each step.
    fn closes_in_steps(count: usize) -> Vec<usize> {
        let (mut pacing, mut now, mut left) = (ClosePacing::default(), Instant::now(), count);
        let mut closes = Vec::new();
        while left > 0 {
            let allowed = pacing.allowed(now, client(1), left);
            assert!((1..=left).contains(&allowed), "{allowed} of {left}");
            left -= allowed;
            closes.push(allowed);
            pacing.record_closed(now, [client(1)]);
            assert_eq!(pacing.allowed(now, client(1), left), 0, "the next moment is later");
            now = pacing.next_moment(client(1)).expect("a close just now");
        }
        closes
    }

    #[test]
    fn a_small_pool_closes_one_by_one_and_a_large_one_within_the_wait_of_its_pod() {
        assert_eq!(closes_in_steps(8), [1; 8]);
        for (count, steps) in [(1, 1), (40, 18), (1_000, 41)] {
            let closes = closes_in_steps(count);
            assert!(closes.len() <= steps, "{count} in {} steps", closes.len());
            assert_eq!(closes.iter().sum::<usize>(), count);
        }
        for count in 0..=1_000 {
            let closes = closes_in_steps(count);
            assert!(closes.is_sorted_by(|a, b| a >= b), "{closes:?}");
            assert!(closes.iter().all(|&it| it <= count.div_ceil(CLOSE_DIVISOR)), "{closes:?}");
        }
    }

    /// One connection at a time is between two requests.
    #[test]
    fn a_busy_pool_closes_within_the_grace_period_of_its_pod_and_a_small_one_at_the_usual_pace() {
        let pauses = |known: usize| (1..=known).rev().map(|left| busy_pause(1, left));
        assert!(pauses(USUAL_PACE_MAX).all(|pause| pause == CLOSE_PAUSE));
        assert!(pauses(1_000).sum::<Duration>() < Duration::from_secs(10));
        assert!(pauses(1_000).all(|pause| !pause.is_zero() && pause <= CLOSE_PAUSE));
        // An eighth of a pool is a whole step, as for a client that is idle.
        assert_eq!(busy_pause(1_000 / CLOSE_DIVISOR, 1_000), CLOSE_PAUSE);
        assert_eq!(busy_pause(1, 0), CLOSE_PAUSE);
    }

    #[test]
    fn each_client_has_its_own_moment_and_only_closes_move_it() {
        let now = Instant::now();
        let mut pacing = ClosePacing::default();
        assert_eq!(pacing.allowed(now, client(1), 0), 0);
        assert_eq!(pacing.allowed(now, client(1), 9), 2);
        assert_eq!(pacing.allowed(now, client(1), 9), 2, "no close was recorded");
        assert_eq!(pacing.next_moment(client(1)), None);
        pacing.record_closed(now, []);
        pacing.record_closed(now, [client(1)]);
        assert_eq!(pacing.next_moment(client(1)), Some(now + CLOSE_PAUSE));
        let before = now + CLOSE_PAUSE - Duration::from_nanos(1);
        assert_eq!([1, 2].map(|it| pacing.allowed(before, client(it), 9)), [0, 2]);
        assert_eq!(pacing.allowed(now + CLOSE_PAUSE, client(1), 9), 2);
    }

    #[test]
    fn clients_whose_moments_are_over_are_forgotten() {
        let (mut pacing, mut now) = (ClosePacing::default(), Instant::now());
        for step in 0..10_000_u32 {
            let [_, high, middle, low] = step.to_be_bytes();
            pacing.record_closed(now, [IpAddr::from([10, high, middle, low])]);
            now += CLOSE_PAUSE / 10;
            assert!(pacing.next_moments.len() <= 10, "{}", pacing.next_moments.len());
        }
        pacing.record_closed(now + CLOSE_PAUSE, []);
        assert!(pacing.next_moments.is_empty());
    }

    #[test]
    fn the_first_connections_of_each_client_are_selected() {
        let now = Instant::now();
        let mut pacing = ClosePacing::default();
        // Nine of each client, in turns; the third one has just had a close.
        let due: Vec<(u8, u16)> =
            (0..9).flat_map(|port| [1, 2, 3].map(|host| (host, port))).collect();
        pacing.record_closed(now, [client(3)]);
        let select = |now| pacing.select(now, due.clone(), |(host, _)| client(*host));
        assert_eq!(select(now), [(1, 0), (2, 0), (1, 1), (2, 1)]);
        assert_eq!(select(now + CLOSE_PAUSE), due[..6]);
        assert!(pacing.select(now, Vec::<u8>::new(), |host| client(*host)).is_empty());
        let all = pacing.select_all(now, due.clone(), |(host, _)| client(*host));
        assert_eq!(all.len(), 18, "all of the first two");
        assert!(all.iter().all(|(host, _)| *host < 3));
    }

    #[test]
    fn connections_that_are_always_spared_keep_no_other_from_its_turn() {
        // Other lists are rotated meanwhile, in a rhythm of their own.
        for others in 0..8 {
            for count in 1..=40_usize {
                let (mut pacing, mut now) = (ClosePacing::default(), Instant::now());
                let mut due: Vec<usize> = (0..count).collect();
                let is_spared = |it: &usize| it.is_multiple_of(2);
                let mut attempts = 0;
                while !due.iter().all(is_spared) {
                    attempts += 1;
                    assert!(attempts < 1_000, "{due:?} beside {others} lists");
                    (0..others).for_each(|_| pacing.rotate(&mut [(); 3]));
                    let mut listed = due.clone();
                    pacing.rotate(&mut listed);
                    let selected = pacing.select(now, listed, |_| client(1));
                    let closed: Vec<usize> =
                        selected.into_iter().filter(|it| !is_spared(it)).collect();
                    due.retain(|it| !closed.contains(it));
                    pacing.record_closed(now, closed.iter().map(|_| client(1)));
                    now += CLOSE_PAUSE;
                }
            }
        }
    }
}
