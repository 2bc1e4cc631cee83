use std::collections::BTreeSet;

use common::wire::NamespacedName;
use datapath::abi;

use crate::{
    machine::{
        ControllerEvent,
        tests::{HELLO, MachineSim, hello},
    },
    world::{ConditionStatus, ConditionType},
};

fn named(name: &str) -> NamespacedName {
    NamespacedName::new("default", name)
}

/// Returns a node on which all activator ports but `free` are in use.
fn crowded(free: usize) -> MachineSim {
    let [first, last] = abi::ACTIVATOR_PORTS;
    assert_eq!((first..=last).count(), 10_000, "as docs/operations.md says");
    let mut sim = MachineSim::new();
    sim.machine.world.ports.extend((first..=last).skip(free));
    sim
}

fn apply(sim: &mut MachineSim, name: &str) {
    sim.apply(&HELLO.replace("{name: hello}", &format!("{{name: {name}}}")));
}

/// Returns the reason for which the Route of this name gets no requests; empty: it gets them.
fn trouble(sim: &MachineSim, name: &str) -> String {
    match sim.machine.world.apps[&named(name)].conditions.get(ConditionType::RouteIngress) {
        ConditionStatus::True(_) => String::new(),
        ConditionStatus::False(why) | ConditionStatus::Unknown(Some(why)) => why.reason.to_string(),
        ConditionStatus::Unknown(None) => "unknown".to_owned(),
    }
}

fn ports(sim: &MachineSim) -> BTreeSet<u16> {
    sim.table().services.values().map(|it| it.activator_port.get()).collect()
}

/// The service whose port becomes free drains for a while, and is planned again meanwhile.
#[test]
fn beyond_ten_thousand_names_a_route_says_so_and_waits_for_the_first_port_that_is_free() {
    let mut sim = crowded(1);
    sim.apply(HELLO);
    sim.decide(1);
    sim.ready_all();
    apply(&mut sim, "after");
    assert_eq!(trouble(&sim, "after"), "NoAddressLeft");
    assert_eq!((trouble(&sim, "hello"), ports(&sim).len()), (String::new(), 1));
    let port = ports(&sim);
    sim.step(ControllerEvent::Delete(hello()));
    assert_eq!((trouble(&sim, "after"), ports(&sim)), (String::new(), port), "it is passed on");
    let uid = sim.uids().remove(0);
    sim.see(&uid, |it| it.drained = true);
    apply(&mut sim, "third");
    assert_eq!(trouble(&sim, "third"), "NoAddressLeft", "a port is given back once");
    assert_eq!(sim.machine.world.ports.len(), 10_000);
}

#[test]
fn a_tag_that_is_not_wanted_any_more_leaves_its_port_to_who_waits() {
    let mut sim = crowded(2);
    let tagged = "\n  traffic:\n  - {latestRevision: true, percent: 100, tag: old}\n";
    sim.apply(&format!("{}{tagged}", HELLO.trim_end()));
    apply(&mut sim, "after");
    assert_eq!((trouble(&sim, "after"), ports(&sim).len()), ("NoAddressLeft".to_owned(), 2));
    let both = ports(&sim);
    sim.apply(HELLO);
    assert_eq!((trouble(&sim, "after"), ports(&sim)), (String::new(), both));
}
