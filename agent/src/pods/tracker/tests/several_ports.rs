//! Pods of a scaled Service: several ports, and processes that Rouse did not configure.

use common::wire::AppProtocol;

use super::*;

/// Returns a pod with the ports 8080, which tells its readiness, and 5432.
fn database_pod() -> wire::PodEntry {
    let ports = vec![
        fixtures::pod_port(80, 8080, AppProtocol::Http1),
        fixtures::pod_port(5432, 5432, AppProtocol::Tcp),
    ];
    wire::PodEntry { ports, keeps_binds: true, ..pod("a", ProbeHandler::Listen) }
}

/// Reads the maps: the readiness port has a listener, and so have these other ports.
fn read_ports(pods: &mut PodTracker, now: Instant, ports: &[u16]) -> Vec<PodTrackerAction> {
    let open = PodTrackerEvent::OpenPortsRead("a".into(), ports.iter().copied().collect());
    let mut actions = pods.step(now, open);
    actions.extend(read_kernel_state(pods, now, listening_state(1)));
    actions
}

fn inspect(pods: &mut PodTracker, now: Instant, listeners: &[&str]) -> Vec<PodTrackerAction> {
    pods.step(now, PodTrackerEvent::Inspected("a".into(), sockets(listeners), 77))
}

fn replan() -> PodTrackerAction {
    PodTrackerAction::ReplanBackends("a".into())
}

fn inspect_again() -> PodTrackerAction {
    PodTrackerAction::Inspect("a".into())
}

const BOTH: [&str; 2] = ["0.0.0.0:8080", "0.0.0.0:5432"];

#[test]
fn a_port_whose_listener_opened_before_the_programs_is_unseen_until_they_see_one() {
    let now = Instant::now();
    let mut pods = registered(database_pod(), now);
    read_ports(&mut pods, now, &[]);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::new(), "nothing listens there");
    let actions = inspect(&mut pods, now, &BOTH);
    assert!(actions.contains(&replan()), "{actions:?}");
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([5432]));
    // Only inspections show that such a listener closes.
    let wake = pods.next_wake().expect("it is inspected again");
    assert!(pods.step(wake, PodTrackerEvent::Tick).contains(&inspect_again()));
    assert_eq!(inspect(&mut pods, wake, &BOTH), [], "as before");
    let actions = read_ports(&mut pods, wake, &[5432]);
    assert_eq!(actions, [replan()]);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::new());
    assert_eq!(pods.next_wake(), None, "the programs report its close");
    assert_eq!(read_ports(&mut pods, wake, &[5432]), [], "as before");
}

#[test]
fn all_ports_of_a_pod_from_before_the_programs_are_unseen() {
    let now = Instant::now();
    let mut pods = registered(database_pod(), now);
    inspect(&mut pods, now, &["0.0.0.0:8080", "127.0.0.1:5432"]);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([8080]), "others cannot reach loopback");
    inspect(&mut pods, now, &BOTH);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([5432, 8080]));
    assert!(inspect(&mut pods, now, &[]).contains(&replan()));
    assert_eq!(pods.unseen_ports("a"), BTreeSet::new());
}

#[test]
fn a_closed_port_is_not_unseen_by_an_older_inspection_and_leaves_the_pod_ready() {
    let now = Instant::now();
    let mut pods = registered(database_pod(), now);
    read_ports(&mut pods, now, &[5432]);
    inspect(&mut pods, now, &BOTH);
    let actions = read_ports(&mut pods, now, &[]);
    assert_eq!(actions, [inspect_again()], "no report: the pod is ready by its other port");
    assert_eq!(pods.unseen_ports("a"), BTreeSet::new(), "connects check it, and go elsewhere");
    // The port has a second listener, which is older than the programs.
    assert!(inspect(&mut pods, now, &BOTH).contains(&replan()));
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([5432]));
    assert_eq!(read_ports(&mut pods, now, &[5432]), [replan()], "seen again");
}

#[test]
fn other_ports_do_not_make_a_pod_ready() {
    let now = Instant::now();
    let mut pods = registered(database_pod(), now);
    let open = PodTrackerEvent::OpenPortsRead("a".into(), [5432].into());
    assert_eq!(pods.step(now, open), []);
    let actions = inspect(&mut pods, now, &["0.0.0.0:5432"]);
    let reason = "nothing listens on port 8080, but on 0.0.0.0:5432: correct the targetPort of the \
                  Service, or the port of the readiness probe";
    let expected = PodObservation { not_ready_reason: reason.into(), ..idle() };
    assert_eq!(reports(actions), [expected]);
}

#[test]
fn a_change_of_ports_registers_the_pod_again_and_leaves_it_ready() {
    let now = Instant::now();
    let mut pods = registered(database_pod(), now);
    read_ports(&mut pods, now, &[5432]);
    let register = [PodTrackerAction::Register("a".into(), facts())];
    let update = |pod: wire::PodEntry| PodTrackerEvent::RouteUpdated(Box::new(pod));
    assert_eq!(pods.step(now, update(database_pod())), [], "nothing changed");
    let mut more = database_pod();
    more.ports.push(fixtures::pod_port(9000, 9000, AppProtocol::Http1));
    let states = |actions: Vec<PodTrackerAction>| -> Vec<(bool, bool)> {
        reports(actions).into_iter().map(|it| (it.ready, it.counts_all_ports)).collect()
    };
    let actions = pods.step(now, update(more));
    assert_eq!(actions[..1], register);
    assert_eq!(states(actions), [(true, false)], "it stays ready, with a port that is not counted");
    // A process may listen on the new port since before the registration.
    let registered = pods.step(now, PodTrackerEvent::Registered("a".into()));
    assert_eq!(registered, [inspect_again()]);
    let actions = inspect(&mut pods, now, &["0.0.0.0:8080", "0.0.0.0:9000"]);
    assert_eq!(states(actions), [(true, true)]);
    assert_eq!(pods.unseen_ports("a"), BTreeSet::from([9000]));
    let fewer = wire::PodEntry { ports: Vec::new(), ..database_pod() };
    assert_eq!(pods.step(now, update(fewer)), register, "no report: nothing changed in it");
    assert_eq!(pods.unseen_ports("a"), BTreeSet::new());
    let outdated = PodTrackerEvent::RegistrationOutdated("a".into());
    assert_eq!(pods.step(now, outdated), register, "its Revision changed");
}

#[test]
fn the_pod_server_of_a_foreign_pod_opens_once_the_pod_is_ready() {
    let now = Instant::now();
    let opens = |actions: &[PodTrackerAction]| {
        let open = PodTrackerAction::OpenPodServer("a".into());
        actions.iter().filter(|action| **action == open).count()
    };
    let mut pods = registered(database_pod(), now);
    assert_eq!(opens(&inspect(&mut pods, now, &["0.0.0.0:5432"])), 0, "not ready");
    assert_eq!(opens(&read_ports(&mut pods, now, &[5432])), 1);
    let closed = read_kernel_state(&mut pods, now, PodKernelState::default());
    assert_eq!(opens(&closed), 0);
    assert_eq!(opens(&read_ports(&mut pods, now, &[5432])), 0, "it is open already");
    let moved = NamespaceFacts { cookie: 8, ..facts() };
    pods.step(now, PodTrackerEvent::NamespaceFound("a".into(), moved));
    pods.step(now, PodTrackerEvent::Registered("a".into()));
    assert_eq!(opens(&read_ports(&mut pods, now, &[])), 1, "another namespace");
    let mut own = registered(pod("a", ProbeHandler::Listen), now);
    let actions = read_kernel_state(&mut own, now, listening_state(1));
    assert_eq!(opens(&actions), 0, "the finder opens it at once");
}
