//! Pure: standby orders and reports on the wire, and the same messages at receivers of earlier releases.

use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::fixtures::{self, standby_order};

/// Fields of a pod that a release without standby reads.
#[derive(Clone, PartialEq, prost::Message)]
struct EarlierPod {
    #[prost(string, tag = "1")]
    uid: String,
    #[prost(int32, tag = "6")]
    phase: i32,
    #[prost(uint32, tag = "8")]
    port: u32,
}

/// Fields of a reported pod that a release without standby reads.
#[derive(Clone, PartialEq, prost::Message)]
struct EarlierPodSeen {
    #[prost(string, tag = "1")]
    uid: String,
    #[prost(bool, tag = "5")]
    ready: bool,
    #[prost(uint64, tag = "7")]
    in_flight: u64,
}

/// Returns a pod with an address, which any phase may have.
fn pod(phase: RoutingPhase, standby: Option<StandbyOrder>) -> PodEntry {
    let address = ([10, 0, 0, 7], 8080).into();
    PodEntry { standby, ..fixtures::pod_at("uid", &name("default/hello-00001"), phase, address) }
}

/// Returns a pod as a receiver of this release gets it.
fn send(pod: PodEntry) -> Result<PodEntry, String> {
    receive(raw::Pod::from(pod))
}

fn receive(pod: raw::Pod) -> Result<PodEntry, String> {
    let received = raw::Pod::decode(pod.encode_to_vec().as_slice()).expect("a message");
    PodEntry::try_from(received).map_err(|error| error.to_string())
}

/// Returns the report on an idle pod that is ready.
fn observation(standby: Option<StandbyReport>) -> PodObservation {
    PodObservation {
        uid: "uid".into(),
        address: Some(([10, 0, 0, 7], 8080).into()),
        other_family_address: None,
        listening: true,
        ready: true,
        drained: true,
        in_flight: 0,
        listening_since_ns: 7,
        not_ready_reason: String::new(),
        counts_all_ports: true,
        standby,
        awaits_stop: false,
    }
}

#[test]
fn a_draining_pod_has_no_order() {
    for phase in [RoutingPhase::Starting, RoutingPhase::Ready] {
        let ordered = pod(phase, Some(standby_order()));
        assert_eq!(send(ordered.clone()), Ok(ordered), "{phase:?}");
    }
    let draining = send(pod(RoutingPhase::Draining, Some(standby_order())));
    assert_eq!(draining, Ok(pod(RoutingPhase::Draining, None)));
}

/// A pod that is frozen again at the moment of its thaw would answer no request.
#[test]
fn an_order_without_a_time_is_refused() {
    let sent = raw::StandbyOrder::from(standby_order());
    let quiet = raw::StandbyOrder { quiet_ms: 0, ..sent };
    let probe = raw::StandbyOrder { probe_ms: 0, ..sent };
    for (order, field) in [(quiet, "standby.quiet_ms"), (probe, "standby.probe_ms")] {
        let running = raw::Pod::from(pod(RoutingPhase::Ready, None));
        let raw = raw::Pod { standby: Some(order), ..running };
        assert_eq!(receive(raw), Err(format!("field {field} is \"0\": must be above 0")));
    }
}

#[test]
fn a_time_below_a_millisecond_is_sent_as_one() {
    let short = Duration::from_micros(300);
    let order = StandbyOrder {
        quiet_time: short,
        probe_time: short,
        agent_timeout: short,
        ..standby_order()
    };
    let received = send(pod(RoutingPhase::Ready, Some(order))).expect("valid").standby;
    let ms = Duration::from_millis(1);
    let times = received.map(|it| [it.quiet_time, it.probe_time, it.agent_timeout]);
    assert_eq!(times, Some([ms; 3]));
}

/// An agent of an earlier release lets the pod run, and activators and agents of one route to it as to any ready pod.
#[test]
fn earlier_releases_take_a_pod_with_an_order_for_a_running_one() {
    let sent = raw::Pod::from(pod(RoutingPhase::Ready, Some(standby_order()))).encode_to_vec();
    let earlier = EarlierPod::decode(sent.as_slice()).expect("a message");
    let ready = raw::PodPhase::Ready.into();
    assert_eq!(earlier, EarlierPod { uid: "uid".into(), phase: ready, port: 8080 });
    let report = StandbyReport { is_frozen: true, ..StandbyReport::default() };
    let sent = raw::PodSeen::from(observation(Some(report))).encode_to_vec();
    let earlier = EarlierPodSeen::decode(sent.as_slice()).expect("a message");
    assert_eq!(earlier, EarlierPodSeen { uid: "uid".into(), ready: true, in_flight: 0 });
}

/// A release whose orders have no timeout of the agent had the default in the controller alone.
#[test]
fn an_order_of_an_earlier_release_has_the_default_timeout_of_the_agent() {
    let agent_timeout = Duration::from_secs(7);
    let sent = raw::StandbyOrder::from(StandbyOrder { agent_timeout, ..standby_order() });
    let earlier = raw::StandbyOrder { agent_timeout_ms: 0, ..sent };
    assert_eq!(StandbyOrder::try_from(earlier), Ok(standby_order()));
}

#[test]
fn senders_of_earlier_releases_know_no_order() {
    let table = EarlierPod { uid: "uid".into(), phase: raw::PodPhase::Starting.into(), port: 8080 };
    let received = raw::Pod::decode(table.encode_to_vec().as_slice()).expect("a message");
    assert_eq!(received.standby, None);
    let report = EarlierPodSeen { uid: "uid".into(), ready: false, in_flight: 2 };
    let received = raw::PodSeen::decode(report.encode_to_vec().as_slice()).expect("a message");
    let seen = PodObservation::try_from(received).expect("valid");
    assert_eq!((seen.standby, seen.in_flight), (None, 2));
}

/// Memory that is not known differs from a pod that holds none.
#[test]
fn a_report_keeps_what_the_node_does_not_tell() {
    for memory_bytes in [None, Some(0), Some(u64::MAX)] {
        for is_frozen in [false, true] {
            let report = StandbyReport { is_frozen, memory_bytes, failure: String::new() };
            let sent = observation(Some(report));
            assert_eq!(receive_report(sent.clone()), sent);
        }
    }
    let failure = "the node has no cgroup v2".into();
    for standby in [None, Some(StandbyReport { failure, ..StandbyReport::default() })] {
        let sent = observation(standby);
        assert_eq!(receive_report(sent.clone()), sent);
    }
}

/// Returns a report as a receiver of this release gets it.
fn receive_report(sent: PodObservation) -> PodObservation {
    let bytes = raw::PodSeen::from(sent).encode_to_vec();
    let received = raw::PodSeen::decode(bytes.as_slice()).expect("a message");
    PodObservation::try_from(received).expect("valid")
}

fn whole_ms() -> impl Strategy<Value = Duration> {
    (1..=u64::MAX).prop_map(Duration::from_millis)
}

proptest! {
    #[test]
    fn each_order_arrives_as_it_was_sent(
        quiet_time in whole_ms(), probe_time in whole_ms(), reclaims_memory in any::<bool>(),
        agent_timeout in whole_ms(),
    ) {
        let order = StandbyOrder { quiet_time, probe_time, reclaims_memory, agent_timeout };
        let sent = pod(RoutingPhase::Ready, Some(order));
        prop_assert_eq!(send(sent.clone()), Ok(sent));
    }
}
