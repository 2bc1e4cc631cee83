//! Shell: clients with long requests and short pauses, on connections that they keep: all move from a draining pod in a
//! pause, and no request is lost.

use std::{
    io::BufReader,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
};

use aya::util::KernelVersion;

use super::{stale_connections::listening_pod_fixture, *};

/// Number of clients. Client N pauses for N times [`PAUSE_STEP`] between two requests.
const CLIENTS: u32 = 20;
/// Difference between the pauses of two clients. The shortest pauses may all be over before a report has arrived.
const PAUSE_STEP: Duration = Duration::from_millis(10);
/// Duration of a request. It is longer than the time over which the closes of a draining pod are spread.
const REQUEST_TIME: Duration = Duration::from_secs(1);
/// Requests after which a client gives up to wait for the end of its connection.
const GIVE_UP_AFTER: u64 = 60;

const REQUEST: &[u8] = b"GET / HTTP/1.1\r\nhost: hello\r\n\r\n";
const RESPONSE: &[u8] = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";

/// True once the test has begun the drain.
static DRAINS: AtomicBool = AtomicBool::new(false);

/// Serves requests on one connection until it ends.
pub(super) fn serve(mut stream: TcpStream) {
    stream.set_nonblocking(false).expect("a socket");
    let Ok(reading_end) = stream.try_clone() else { return };
    // An empty line ends a head.
    for line in BufReader::new(reading_end).lines().map_while(Result::ok) {
        if line.is_empty() {
            thread::sleep(REQUEST_TIME);
            if stream.write_all(RESPONSE).is_err() {
                return;
            }
        }
    }
}

/// Runs all clients. A line of the input tells that the drain has begun; the output has a line for each client's end.
pub(super) fn run_clients() {
    let clients = (1..=CLIENTS).map(|number| PAUSE_STEP * number);
    let threads: Vec<_> =
        clients.map(|pause| thread::spawn(move || println!("{}", run_client(pause)))).collect();
    let mut line = String::new();
    std::io::stdin().lock().read_line(&mut line).expect("a pipe");
    DRAINS.store(true, Relaxed);
    threads.into_iter().for_each(|client| client.join().expect("no panic"));
}

/// Sends requests until the connection ends. Returns how it ended, and the number of requests since the drain began.
fn run_client(pause: Duration) -> String {
    let mut stream = TcpStream::connect(POD_ADDRESS).expect("the pod listens");
    println!("connected");
    let mut count = 0;
    let mut response = [0; RESPONSE.len()];
    while count < GIVE_UP_AFTER {
        // No byte of a request that is refused has been sent, so a client may send it on another connection.
        if let Err(error) = stream.write_all(REQUEST) {
            return format!("refused {:?} {count}", error.kind());
        }
        if let Err(error) = stream.read_exact(&mut response) {
            return format!("lost {:?} {count}", error.kind());
        }
        count += u64::from(DRAINS.load(Relaxed));
        thread::sleep(pause);
    }
    format!("open - {count}")
}

#[test]
fn clients_that_pause_for_milliseconds_leave_a_draining_pod_and_lose_no_request() {
    let (mut fixture, clients) = listening_pod_fixture("serve");
    if fixture.metric_count("rouse_agent_ends_locked") == 0 {
        let kernel = KernelVersion::current().expect("it has a version");
        assert!(kernel < KernelVersion::new(6, 5, 0), "{kernel:?} can close them");
        return;
    }
    let mut command = fixture.process_command("pausing-clients", &clients);
    let mut process = command.stdout(Stdio::piped()).spawn().expect("sh");
    let output = BufReader::new(process.stdout.take().expect("a pipe"));
    let mut lines = output.lines().map_while(Result::ok);
    let is_connected = |line: &String| line == "connected";
    assert_eq!(
        lines.by_ref().filter(is_connected).take(CLIENTS as usize).count(),
        CLIENTS as usize
    );
    fixture.wait_usage("all are busy", |usage| usage.totals.started >= CLIENTS.into());
    fixture.set_pod(RoutingPhase::Draining, ProbeHandler::Listen);
    writeln!(process.stdin.as_mut().expect("a pipe"), "drains").expect("it reads");
    let ends: Vec<String> = lines
        .filter(|line| ["refused ", "lost ", "open "].iter().any(|it| line.starts_with(it)))
        .take(CLIENTS as usize)
        .collect();
    process.wait().expect("it has ended");
    let closed = ends.iter().filter(|line| line.starts_with("refused ConnectionAborted "));
    assert_eq!(closed.count(), CLIENTS as usize, "each was closed in a pause: {ends:?}");
    let reported = fixture.metric_count("rouse_agent_connections_ended_by_report_total");
    assert!(reported > 0, "reports came too late for each pause: {ends:?}");
    fixture.wait_pod("drained", |pod| pod.drained);
}
