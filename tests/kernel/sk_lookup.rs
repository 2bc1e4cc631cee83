//! Shell: one listener of the activator for the ports of all services.

use std::{
    fs::File,
    net::{IpAddr, Ipv4Addr},
    path::{Path, PathBuf},
    thread::JoinHandle,
};

use activator::listeners::port_range::{PortRangeError, PortRangeListener};
use agent::kernel::programs::ports_map;
use common::wire::ConnectionPath;
use datapath::abi;
use nix::sched::{CloneFlags, setns};
use tokio::{
    io::AsyncWriteExt as _,
    net::TcpListener,
    runtime::Builder,
    sync::oneshot::{self, Sender},
};
use tokio_util::sync::CancellationToken;

use crate::fixture::{KernelFixture, NetnsFixture, SharedKernelFixture, in_netns};

const ECONNREFUSED: i32 = 111;

/// Listeners of the activator in a network namespace. Each client receives the port that it connected to. Closed on
/// drop.
struct ActivatorListeners(Option<(CancellationToken, JoinHandle<()>)>);

impl ActivatorListeners {
    fn start(fixture: &KernelFixture, activator: &NetnsFixture) -> Self {
        let (netns, map) = (netns_path(activator), ports_map(&fixture.paths().bpffs));
        let addresses = [
            activator.ipv4().parse().expect("an address"),
            activator.ipv6().parse().expect("an address"),
        ];
        let stop = CancellationToken::new();
        let (ready, listening) = oneshot::channel();
        let inside = stop.clone();
        let thread = std::thread::spawn(move || {
            setns(File::open(netns).expect("`ip netns add` made it"), CloneFlags::CLONE_NEWNET)
                .expect("root may enter it");
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
            runtime.block_on(serve(&map, &addresses, ready, inside));
        });
        listening.blocking_recv().expect("the listeners are in the map");
        Self(Some((stop, thread)))
    }
}

impl Drop for ActivatorListeners {
    fn drop(&mut self) {
        let Some((stop, thread)) = self.0.take() else { return };
        stop.cancel();
        let _panicked_already = thread.join();
    }
}

async fn serve(map: &Path, addresses: &[IpAddr], ready: Sender<()>, stop: CancellationToken) {
    let (_range, listeners) = PortRangeListener::open(map, addresses, CancellationToken::new())
        .expect("the map is pinned");
    ready.send(()).expect("the test waits for it");
    let tasks = listeners.into_iter().map(|listener| tokio::spawn(send_port(listener)));
    let tasks: Vec<_> = tasks.collect();
    stop.cancelled().await;
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
}

async fn send_port(listener: TcpListener) {
    loop {
        let (mut stream, _) = listener.accept().await.expect("it listens");
        let port = stream.local_addr().expect("connected").port();
        let greeting = format!("{port}\n");
        stream.write_all(greeting.as_bytes()).await.expect("the client waits for it");
    }
}

fn netns_path(netns: &NetnsFixture) -> PathBuf {
    Path::new("/run/netns").join(&netns.netns)
}

fn serve_ports(fixture: &mut KernelFixture, netns: &NetnsFixture) {
    let programs = fixture.programs.as_mut().expect("the fixture loaded them");
    programs.serve_ports(&netns_path(netns)).expect("root may attach it");
}

#[test]
fn one_listener_serves_the_ports_of_all_services() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator) = (fixture.add_client(), fixture.add_client());
    serve_ports(&mut fixture, &activator);
    let _listening = ActivatorListeners::start(&fixture, &activator);
    fixture.add_activator(&activator);
    fixture.add_service(1, ConnectionPath::Direct);
    fixture.add_service(2, ConnectionPath::Direct);
    fixture.apply_table();
    let mut client = client.start_process();
    for port in [20_000, 24_321, 29_999] {
        for address in [activator.ipv4(), format!("[{}]", activator.ipv6())] {
            let address = format!("{address}:{port}");
            assert_eq!(
                client.expect_step(&format!("connect {address}")),
                format!("{port} {address}")
            );
        }
    }
    // Sleeping services: connects are routed to the activator, and the port still identifies the service.
    assert_eq!(client.expect_step("connect 10.96.0.1:80"), "20001 10.96.0.1:80");
    assert_eq!(client.expect_step("connect [fd96::2]:80"), "20002 [fd96::2]:80");
    assert_eq!(client.expect_step("hammer 10.96.0.2:80 50"), "20002=50");
}

#[test]
fn other_ports_and_addresses_keep_their_listeners() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator) = (fixture.add_client(), fixture.add_client());
    serve_ports(&mut fixture, &activator);
    let _listening = ActivatorListeners::start(&fixture, &activator);
    let mut other_process = activator.start_process();
    other_process.expect_step(&format!("listen {}:30000 above", activator.ipv4()));
    other_process.expect_step("listen 127.0.0.1:20001 loopback");
    assert_eq!(other_process.expect_step("connect 127.0.0.1:20001"), "loopback 127.0.0.1:20001");
    let mut client = client.start_process();
    let (above, below) =
        (format!("{}:30000", activator.ipv4()), format!("{}:19999", activator.ipv4()));
    assert_eq!(client.expect_step(&format!("connect {above}")), format!("above {above}"));
    assert_eq!(client.run_step(&format!("connect {below}")), Err(ECONNREFUSED));
}

#[test]
fn a_listener_that_closes_makes_room_for_sockets_of_single_ports_and_for_the_next() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator) = (fixture.add_client(), fixture.add_client());
    serve_ports(&mut fixture, &activator);
    let address = format!("{}:20001", activator.ipv4());
    let mut client = client.start_process();
    let first = ActivatorListeners::start(&fixture, &activator);
    assert_eq!(client.expect_step(&format!("connect {address}")), format!("20001 {address}"));
    drop(first);
    assert_eq!(client.run_step(&format!("connect {address}")), Err(ECONNREFUSED));
    let mut single = activator.start_process();
    single.expect_step(&format!("listen {address} own"));
    assert_eq!(client.expect_step(&format!("connect {address}")), format!("own {address}"));
    let _next = ActivatorListeners::start(&fixture, &activator);
    assert_eq!(client.expect_step(&format!("connect {address}")), format!("20001 {address}"));
}

/// Refused addresses make the activator open one listener for each service's port instead.
#[test]
fn more_addresses_than_there_is_room_for_are_refused_and_leave_nothing() {
    let mut fixture = SharedKernelFixture::new();
    let activator = fixture.add_client();
    serve_ports(&mut fixture, &activator);
    let map = ports_map(&fixture.paths().bpffs);
    let open = |count: u32| {
        in_netns(&activator.netns, || {
            let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
            let _entered = runtime.enter();
            let addresses = (1..=count).map(|last| Ipv4Addr::from_bits(0x7f00_0000 + last).into());
            let addresses: Vec<IpAddr> = addresses.collect();
            PortRangeListener::open(&map, &addresses, CancellationToken::new()).map(drop)
        })
    };
    let refused = open(abi::PORTS_MAX + 1).expect_err("one too many");
    assert!(matches!(refused, PortRangeError::Map { .. }), "{refused}");
    open(abi::PORTS_MAX).expect("as many as there is room for");
}

#[test]
fn the_next_agent_takes_the_program_over_without_a_gap() {
    let mut fixture = SharedKernelFixture::new();
    let (client, activator) = (fixture.add_client(), fixture.add_client());
    serve_ports(&mut fixture, &activator);
    let _listening = ActivatorListeners::start(&fixture, &activator);
    let mut client = client.start_process();
    client.send_step(&format!("hammer {}:20007 500", activator.ipv4()));
    for _ in 0..5 {
        let programs =
            agent::kernel::programs::EbpfPrograms::load(fixture.paths().clone()).unwrap();
        fixture.programs = Some(programs);
        serve_ports(&mut fixture, &activator);
    }
    assert_eq!(client.read_reply(), Ok("20007=500".into()));
}

#[test]
fn the_program_follows_a_namespace_that_was_recreated() {
    let mut fixture = SharedKernelFixture::new();
    let activator = fixture.add_client();
    serve_ports(&mut fixture, &activator);
    let programs = fixture.programs.as_ref().expect("the fixture loaded them");
    assert_eq!(programs.keep_attached().unwrap(), 0);
    crate::fixture::run_ip(&["netns", "del", &activator.netns]);
    assert!(programs.keep_attached().is_err(), "there is nothing to attach to");
    crate::fixture::add_netns(&activator.netns);
    assert_eq!(programs.keep_attached().unwrap(), 1);
    assert_eq!(programs.keep_attached().unwrap(), 0);
}
