//! Pure: the kernel's counts of listeners, and the entries that can be deleted.
//!
//! Each namespace and port with a listener has an entry in `LISTEN`, of any pod: most processes listen before the agent
//! knows their pod. The eBPF programs never delete an entry.

use std::time::Duration;

use datapath::abi::ListenValue;

/// Age of a closed entry's newest listener at which the entry is deleted. A process that soon opens its listener again
/// keeps the entry.
const DELETE_AFTER: Duration = Duration::from_secs(60);

/// Number of listeners from a gauge of `LISTEN`; a gauge below zero means none. An entry may be deleted while its
/// listener is open, as the RouteTable does not name its pod for a moment. The gauge falls below zero when that
/// listener closes.
pub(crate) fn count(gauge: u32) -> u32 {
    if is_below_zero(gauge) { 0 } else { gauge }
}

/// Returns true if an entry can be deleted. Entries of a pod's serving ports stay while the pod exists, unless their
/// count is below zero. Then a new entry counts the next listener right.
pub(crate) fn is_deletable(listen: &ListenValue, is_serving: bool, now_ns: u64) -> bool {
    if is_serving {
        return is_below_zero(listen.reachable) || is_below_zero(listen.loopback);
    }
    let is_closed = count(listen.reachable) == 0 && count(listen.loopback) == 0;
    is_closed
        && Duration::from_nanos(now_ns.saturating_sub(listen.listening_since_ns)) >= DELETE_AFTER
}

fn is_below_zero(gauge: u32) -> bool {
    i32::try_from(gauge).is_err()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE_LESS: u32 = 0u32.wrapping_sub(1);

    #[test]
    fn a_listener_that_closes_after_its_entry_was_forgotten_is_none() {
        assert_eq!([0, 1, 7, ONE_LESS].map(count), [0, 1, 7, 0]);
    }

    #[test]
    fn entries_are_forgotten_when_all_is_closed_but_those_of_pods_that_serve() {
        let at_ns = |seconds: u64| seconds * 1_000_000_000;
        let listen = |reachable, loopback| ListenValue {
            reachable,
            loopback,
            listening_since_ns: at_ns(10),
            ..ListenValue::default()
        };
        let is_deletable = |reachable, loopback, is_serving, seconds| {
            is_deletable(&listen(reachable, loopback), is_serving, at_ns(seconds))
        };
        assert!(is_deletable(0, 0, false, 70));
        assert!(!is_deletable(0, 0, false, 69), "it may open again");
        assert!(!is_deletable(1, 0, false, 700) && !is_deletable(0, 1, false, 700), "open");
        assert!(is_deletable(ONE_LESS, 0, false, 70), "its pod was forgotten before it closed");
        assert!(!is_deletable(0, 0, true, 700), "the pod's process may be started again");
        assert!(is_deletable(ONE_LESS, 0, true, 11), "the next listener would not count");
    }
}
