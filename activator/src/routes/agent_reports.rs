//! Pure: pods that agents report as ready, by the streams of the agents.
//!
//! Nothing is decided here. The RouteTable states for which pods the report of an agent counts, and at which address.

use std::{collections::HashMap, net::SocketAddr};

/// Number of a stream of reports. Of several streams of one agent, only the latest counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AgentStreamNumber(u64);

/// Pods that agents report as ready, by the agent's node.
#[derive(Debug, Default)]
pub(crate) struct AgentReports {
    by_node: HashMap<String, ReadyPodReports>,
    last_stream: AgentStreamNumber,
}

/// Reports of one agent over its latest stream.
#[derive(Debug)]
struct ReadyPodReports {
    stream: AgentStreamNumber,
    /// Address at which each pod is ready, by uid.
    addresses: HashMap<String, SocketAddr>,
}

impl AgentReports {
    /// Begins a stream of the agent on this node. Returns its number, and the uids of the pods that an earlier stream
    /// has reported as ready: their reports are withdrawn.
    pub(crate) fn begin_stream(&mut self, node: &str) -> (AgentStreamNumber, Vec<String>) {
        self.last_stream.0 += 1;
        let stream = self.last_stream;
        let reports = ReadyPodReports { stream, addresses: HashMap::new() };
        let earlier = self.by_node.insert(node.to_owned(), reports);
        (stream, earlier.map(ReadyPodReports::into_uids).unwrap_or_default())
    }

    /// Ends a stream. Returns the uids of the pods whose reports are withdrawn: none if a later stream has begun.
    pub(crate) fn end_stream(&mut self, node: &str, stream: AgentStreamNumber) -> Vec<String> {
        if self.by_node.get(node).is_none_or(|it| it.stream != stream) {
            return Vec::new();
        }
        self.by_node.remove(node).map(ReadyPodReports::into_uids).unwrap_or_default()
    }

    /// Records that the pod is ready at this address, or (`None`) is not ready. Without effect if a later stream of the
    /// agent has begun.
    pub(crate) fn record(
        &mut self,
        node: &str,
        stream: AgentStreamNumber,
        uid: &str,
        ready_at: Option<SocketAddr>,
    ) {
        let Some(reports) = self.by_node.get_mut(node).filter(|it| it.stream == stream) else {
            return;
        };
        match ready_at {
            Some(address) => drop(reports.addresses.insert(uid.to_owned(), address)),
            None => drop(reports.addresses.remove(uid)),
        }
    }

    /// Returns true if the agent on this node reports the pod as ready at this address.
    pub(crate) fn is_ready_at(&self, node: &str, uid: &str, address: SocketAddr) -> bool {
        let reported = self.by_node.get(node).and_then(|it| it.addresses.get(uid));
        reported == Some(&address)
    }
}

impl ReadyPodReports {
    fn into_uids(self) -> Vec<String> {
        self.addresses.into_keys().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(number: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, number], 8080))
    }

    #[test]
    fn a_pod_is_ready_only_at_the_address_that_its_own_agent_reports() {
        let mut reports = AgentReports::default();
        let (stream, earlier) = reports.begin_stream("n1");
        assert_eq!(earlier, [""; 0]);
        assert!(!reports.is_ready_at("n1", "p", address(1)));
        reports.record("n1", stream, "p", Some(address(1)));
        assert!(reports.is_ready_at("n1", "p", address(1)));
        assert!(!reports.is_ready_at("n1", "p", address(2)));
        assert!(!reports.is_ready_at("n2", "p", address(1)));
        assert!(!reports.is_ready_at("n1", "q", address(1)));
        reports.record("n1", stream, "p", None);
        assert!(!reports.is_ready_at("n1", "p", address(1)));
    }

    #[test]
    fn a_new_stream_withdraws_what_the_earlier_one_reported() {
        let mut reports = AgentReports::default();
        let (first, _) = reports.begin_stream("n1");
        reports.record("n1", first, "p", Some(address(1)));
        let (second, withdrawn) = reports.begin_stream("n1");
        assert_eq!(withdrawn, ["p"]);
        assert!(!reports.is_ready_at("n1", "p", address(1)));
        reports.record("n1", first, "p", Some(address(1)));
        assert!(!reports.is_ready_at("n1", "p", address(1)), "a late report has no effect");
        reports.record("n1", second, "p", Some(address(1)));
        assert_eq!(reports.end_stream("n1", first), [""; 0], "a late end has no effect");
        assert!(reports.is_ready_at("n1", "p", address(1)));
        assert_eq!(reports.end_stream("n1", second), ["p"]);
        assert!(!reports.is_ready_at("n1", "p", address(1)));
        reports.record("n1", second, "p", Some(address(1)));
        assert!(!reports.is_ready_at("n1", "p", address(1)), "its stream has ended");
    }
}
