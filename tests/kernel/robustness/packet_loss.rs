//! Shell: a link that loses, reorders and duplicates packets, like netem, which not every kernel has.

use std::{
    collections::VecDeque,
    fs::File,
    io::{Read as _, Write as _},
    net::TcpStream,
    os::fd::AsFd as _,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{CaseRng, RobustnessFixture, get_request, send_and_read};
use crate::{
    fixture::{NetnsFixture, SERVING_PORT, in_netns, run_ip},
    sys,
};

/// Addresses of the two ends of the link.
const POD: &str = "10.97.0.1";
const CLIENT: &str = "10.97.0.2";
/// Rates of faults, in 1,000 packets.
const LOST_PER_MILLE: usize = 10;
const LATE_PER_MILLE: usize = 50;
const DUPLICATED_PER_MILLE: usize = 10;
/// Highest number of packets that overtake a late one, and its delay if none comes.
const MAX_OVERTAKING_PACKETS: usize = 3;
const MAX_DELAY: Duration = Duration::from_millis(2);

/// Numbers of packets by fault.
#[derive(Debug, Default)]
struct LinkFaultTotals {
    forwarded: AtomicU64,
    lost: AtomicU64,
    delayed: AtomicU64,
    duplicated: AtomicU64,
}

/// Two devices between which threads forward packets, one for each direction.
struct LossyLink {
    is_stopped: Arc<AtomicBool>,
    faults: Arc<LinkFaultTotals>,
    threads: Vec<JoinHandle<()>>,
}

impl LossyLink {
    fn between(client: &NetnsFixture, pod: &NetnsFixture) -> Self {
        let open_end = |netns: &NetnsFixture, own_ip: &str, other_ip: &str| {
            let device = in_netns(&netns.netns, || sys::open_tun("lossy0").expect("CONFIG_TUN"));
            run_ip(&["-n", &netns.netns, "addr", "add", own_ip, "peer", other_ip, "dev", "lossy0"]);
            run_ip(&["-n", &netns.netns, "link", "set", "lossy0", "up"]);
            device
        };
        let ends = [open_end(client, CLIENT, POD), open_end(pod, POD, CLIENT)].map(Arc::new);
        let (is_stopped, faults) =
            (Arc::<AtomicBool>::default(), Arc::<LinkFaultTotals>::default());
        let spawn_direction = |direction: usize| {
            let (from, to) = (Arc::clone(&ends[direction]), Arc::clone(&ends[1 - direction]));
            let (stops, faults, rng) =
                (Arc::clone(&is_stopped), Arc::clone(&faults), CaseRng(direction as u64));
            thread::spawn(move || forward_packets(&from, &to, &stops, &faults, rng))
        };
        let threads = vec![spawn_direction(0), spawn_direction(1)];
        Self { is_stopped, faults, threads }
    }
}

impl Drop for LossyLink {
    fn drop(&mut self) {
        self.is_stopped.store(true, Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

/// A delayed packet: time of its arrival, and number of packets that are still to overtake it.
struct DelayedPacket(Vec<u8>, Instant, usize);

fn forward_packets(
    source: &File,
    destination: &File,
    stops: &AtomicBool,
    faults: &LinkFaultTotals,
    mut rng: CaseRng,
) {
    let mut delayed = VecDeque::<DelayedPacket>::new();
    let send = |packet: &[u8]| {
        // The device of a removed namespace refuses packets.
        let _gone = (&*destination).write(packet);
    };
    while !stops.load(Relaxed) {
        let mut ready = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
        let is_ready = poll(&mut ready, PollTimeout::from(2u8)).expect("a device") > 0;
        if is_ready {
            let mut packet = vec![0; 65_536];
            let count = (&*source).read(&mut packet).unwrap_or_default();
            packet.truncate(count);
            faults.forwarded.fetch_add(1, Relaxed);
            let per_mille = rng.next_below(1_000);
            if per_mille < LOST_PER_MILLE {
                faults.lost.fetch_add(1, Relaxed);
            } else if per_mille < LOST_PER_MILLE + LATE_PER_MILLE {
                faults.delayed.fetch_add(1, Relaxed);
                delayed.push_back(DelayedPacket(
                    packet,
                    Instant::now(),
                    1 + rng.next_below(MAX_OVERTAKING_PACKETS),
                ));
            } else {
                send(&packet);
                if per_mille >= 1_000 - DUPLICATED_PER_MILLE {
                    faults.duplicated.fetch_add(1, Relaxed);
                    send(&packet);
                }
                delayed.iter_mut().for_each(|it| it.2 = it.2.saturating_sub(1));
            }
        }
        delayed.retain(|DelayedPacket(packet, since, left)| {
            let due = *left == 0 || since.elapsed() >= MAX_DELAY;
            if due {
                send(packet);
            }
            !due
        });
    }
}

/// Sends `count` requests on connections of up to 30 each, which the client closes after its last response.
fn send_requests(netns: &str, count: usize, mut rng: CaseRng) {
    let mut remaining = count;
    while remaining > 0 {
        let mut stream =
            in_netns(netns, || TcpStream::connect((POD, SERVING_PORT)).expect("it listens"));
        stream.set_nodelay(true).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        for _ in 0..remaining.min(1 + rng.next_below(30)) {
            remaining -= 1;
            match rng.next_below(5) {
                0 => send_and_read(
                    &mut stream,
                    &get_request("chunks/3000"),
                    "\r\n0\r\nTrailer: x\r\n\r\n",
                ),
                1 => send_and_read(
                    &mut stream,
                    &get_request("chunked-file/40000"),
                    "\n\r\n0\r\n\r\n",
                ),
                2 => {
                    let body = "GET / HTTP/1.1\r\n\r\n".repeat(1_000);
                    let head = "POST /length/5 HTTP/1.1\r\nContent-Length: 18000\r\n\r\n";
                    send_and_read(&mut stream, &(head.to_owned() + &body), "xxxxx");
                }
                3 => {
                    let chunks = "12\r\nGET / HTTP/1.1\r\n\r\n\r\n".repeat(200);
                    let head = "POST /length/5 HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";
                    send_and_read(&mut stream, &format!("{head}{chunks}0\r\n\r\n"), "xxxxx");
                }
                _ => send_and_read(&mut stream, &get_request("length/5"), "xxxxx"),
            }
        }
    }
}

#[test]
#[allow(clippy::print_stdout, reason = "the figures are for people")]
fn requests_over_a_link_that_loses_reorders_and_repeats_packets_are_counted_once() {
    const CLIENTS: u64 = 8;
    const EACH: usize = 250;
    let fixture = RobustnessFixture::new();
    let link = LossyLink::between(&fixture.client, &fixture.pod);
    let _server = fixture.start_server();
    let netns = &fixture.client.netns;
    thread::scope(|scope| {
        (0..CLIENTS)
            .for_each(|seed| drop(scope.spawn(move || send_requests(netns, EACH, CaseRng(seed)))));
    });
    assert_eq!(fixture.served_requests(), CLIENTS * EACH as u64);
    println!("{:?}, {:?}", link.faults, fixture.pod_state());
    fixture.wait_settled();
    let faults = &link.faults;
    for count in [&faults.lost, &faults.delayed, &faults.duplicated] {
        assert!(count.load(Relaxed) > 50, "{faults:?}");
    }
}
