//! Shell: an upgrade of the eBPF programs to another ABI, with connections open.

use agent::kernel::pod_registration::PodRegistration;

use super::*;
use crate::fixture::registration;

/// Waits until the row `slot` is as expected: threads of the server may end a connection late.
#[track_caller]
fn wait_row(fixture: &CountFixture, slot: u32, is_expected: impl Fn(&abi::PodState) -> bool) {
    let until = Instant::now() + WAIT_TIMEOUT;
    let mut state = fixture.kernel.maps.pod_state(slot);
    while !is_expected(&state) {
        assert!(Instant::now() < until, "{state:?}");
        thread::sleep(Duration::from_millis(10));
        state = fixture.kernel.maps.pod_state(slot);
    }
}

/// Programs with another version number act as a new ABI: old and new ones share only the sockets that they see.
#[test]
fn an_upgrade_to_another_abi_loses_no_connection_and_no_count() {
    let mut fixture = CountFixture::exclusive();
    let old_pins = fixture.kernel.paths().pins();
    let mut connections: Vec<_> = (0..8).map(|_| fixture.connect()).collect();
    for stream in &mut connections {
        fixture.send_and_read(stream, &get_request("/length/5"), "xxxxx");
    }
    let mut waiting_connection = fixture.connect();
    waiting_connection.write_all(get_request("/wait").as_bytes()).unwrap();
    fixture.server.wait_request_count(9);
    let load = fixture.start_clients(4, 4_000);

    let version = fixture.kernel.paths().version + 1;
    let paths = agent::paths::AgentPaths { version, ..fixture.kernel.paths().clone() };
    let mut programs = agent::kernel::programs::EbpfPrograms::load(paths.clone()).unwrap();
    assert_eq!(programs.previous_pins(), Some(old_pins.as_path()));
    drop(fixture.kernel.programs.take());
    let new = agent::kernel::maps::KernelMaps::open(&paths.pins()).unwrap();
    fixture.kernel.maps = new.with_previous(programs.previous_pins());
    // Another row than in the earlier version, because rows need not be equal.
    let slot = fixture.slot() + 100;
    let pod = PodRegistration { slot, ..registration(&fixture.pod, 0, &[]) };
    fixture.kernel.maps.register_pod(fixture.pod.cookie, &pod).unwrap();
    programs.take_over().unwrap();
    programs.verify_by_self_test(&mut fixture.kernel.maps).unwrap();
    assert_eq!(programs.keep_attached().unwrap(), 0);
    load.into_iter().for_each(|client| client.join().unwrap());

    // Connections from before the upgrade and after it, idle and busy.
    connections
        .iter_mut()
        .for_each(|it| fixture.send_and_read(it, &get_request("/length/5"), "xxxxx"));
    let mut fresh: Vec<_> = (0..8).map(|_| fixture.connect()).collect();
    fresh.iter_mut().for_each(|it| fixture.send_and_read(it, &get_request("/length/5"), "xxxxx"));
    fixture.settled_request_count(slot);
    assert!(!fixture.kernel.maps.fold_previous(true), "a request is in flight there");
    wait_row(&fixture, slot, |it| it.in_flight == 1);
    fixture.server.open_gate();
    read_until(&mut waiting_connection, "wait");
    drop((connections, fresh, waiting_connection));
    let served = fixture.settled_request_count(slot);
    assert!(served > 16_000, "{served}");
    wait_row(&fixture, slot, |it| it.in_flight == 0);
    let totals = |fixture: &CountFixture| {
        let totals = fixture.kernel.maps.totals(slot);
        (totals.started, totals.finished)
    };
    assert_eq!(totals(&fixture), (served, served));
    wait_row(&fixture, slot, |it| {
        (it.in_flight, it.connections, it.awaiting_first_request) == (0, 0, 0)
    });

    assert!(fixture.kernel.maps.fold_previous(true), "everything there has closed");
    assert_eq!(totals(&fixture), (served, served), "taken over");
    programs.retire_previous().unwrap();
    assert!(!old_pins.exists());
    let mut stream = fixture.connect();
    fixture.send_and_read(&mut stream, &get_request("/length/5"), "xxxxx");
    drop(stream);
    fixture.settled_request_count(slot);
    assert_eq!(totals(&fixture), (served + 1, served + 1));
    fixture.kernel.programs = Some(programs);
}
