use std::collections::BTreeSet;

use common::wire::NamespacedName;
use datapath::abi;

use crate::{
    decide::machine::{
        ControllerEvent,
        tests::{HELLO, MachineSim, hello},
    },
    model::cluster_state::{ConditionStatus, ConditionType},
};

fn named(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

/// Returns a node on which all activator ports but `free` are in use.
fn node_with_free_ports(free: usize) -> MachineSim {
    let [first, last] = abi::ACTIVATOR_PORTS;
    assert_eq!((first..=last).count(), 10_000, "as docs/operations.md says");
    let mut sim = MachineSim::new();
    sim.machine.cluster.allocated.ports.extend((first..=last).skip(free));
    sim
}

fn apply(sim: &mut MachineSim, name: &str) {
    sim.apply(&HELLO.replace("{name: hello}", &format!("{{name: {name}}}")));
}

/// Returns the reason for which the Route of this name gets no requests; empty: it gets them.
fn route_error(sim: &MachineSim, name: &str) -> String {
    match sim.machine.cluster.apps[&named(name)].conditions.get(ConditionType::RouteIngress) {
        ConditionStatus::True(_) => String::new(),
        ConditionStatus::False(reason) | ConditionStatus::Unknown(Some(reason)) => {
            reason.reason.to_string()
        }
        ConditionStatus::Unknown(None) => "unknown".to_owned(),
    }
}

fn ports(sim: &MachineSim) -> BTreeSet<u16> {
    sim.table().services.values().map(|it| it.activator_port.get()).collect()
}

/// The service whose port becomes free drains for a while, and is planned again meanwhile.
#[test]
fn without_a_free_port_a_route_reports_it_and_waits_for_one() {
    let mut sim = node_with_free_ports(1);
    sim.apply(HELLO);
    sim.decide(1);
    sim.report_all_ready();
    apply(&mut sim, "after");
    assert_eq!(route_error(&sim, "after"), "NoAddressLeft");
    assert_eq!((route_error(&sim, "hello"), ports(&sim).len()), (String::new(), 1));
    let port = ports(&sim);
    sim.step(ControllerEvent::ManifestDeleted(hello()));
    assert_eq!(
        (route_error(&sim, "after"), ports(&sim)),
        (String::new(), port),
        "the port has a new owner"
    );
    let uid = sim.pod_uids().remove(0);
    sim.report_pod(&uid, |it| it.drained = true);
    apply(&mut sim, "third");
    assert_eq!(route_error(&sim, "third"), "NoAddressLeft", "a port is released once");
    assert_eq!(sim.machine.cluster.allocated.ports.len(), 10_000);
}

#[test]
fn a_removed_tag_releases_its_port_to_a_waiting_route() {
    let mut sim = node_with_free_ports(2);
    let tagged = "\n  traffic:\n  - {latestRevision: true, percent: 100, tag: old}\n";
    sim.apply(&format!("{}{tagged}", HELLO.trim_end()));
    apply(&mut sim, "after");
    assert_eq!((route_error(&sim, "after"), ports(&sim).len()), ("NoAddressLeft".to_owned(), 2));
    let both = ports(&sim);
    sim.apply(HELLO);
    assert_eq!((route_error(&sim, "after"), ports(&sim)), (String::new(), both));
}
