//! Shell: main functions of this program as an agent, as a pod, and as a client of the pod.

use std::{
    env,
    io::{BufRead as _, ErrorKind, Read as _, Write as _},
    net::{Shutdown, TcpListener, TcpStream},
    sync::mpsc,
    thread,
    time::Duration,
};

use clap::Parser as _;
use tokio_util::sync::CancellationToken;

use super::{POD_ADDRESS, ROLE_INPUT_VARIABLE, SERVICE_ADDRESS, cluster_services, pausing_clients};

/// Connections in the pool of [`run_pool_client`].
pub(super) const POOL_CONNECTIONS: u64 = 12;

pub(super) fn run_agent() {
    tracing_subscriber::fmt().with_writer(std::io::stderr).init();
    let config = agent::config::AgentConfig::parse_from(["agent"]);
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    runtime
        .block_on(agent::run(config, CancellationToken::new()))
        .expect("it runs until it is killed");
}

/// Opens a connection to the pod's own address, sends its bytes, and prints received bytes and how the connection ends.
pub(super) fn run_client() {
    run_connected_client(TcpStream::connect(POD_ADDRESS).expect("the pod listens"));
}

/// Runs as [`run_client`], on a connection that the eBPF programs have led to the pod.
pub(super) fn run_led_client() {
    run_connected_client(connect_to_service());
}

/// Opens a connection that the eBPF programs lead to the pod, closes its own direction, and prints how the other one
/// ends.
pub(super) fn run_half_closed_client() {
    let stream = connect_to_service();
    stream.shutdown(Shutdown::Write).expect("an open connection");
    run_connected_client(stream);
}

/// Opens the connections of a pool, and sends a request on each. It never reads the first response. Of the other
/// connections it prints received bytes and how each one ends.
pub(super) fn run_pool_client() {
    let request = env::var(ROLE_INPUT_VARIABLE).expect("a request");
    let connect = |_| TcpStream::connect(POD_ADDRESS).expect("the pod listens");
    let mut pool: Vec<TcpStream> = (0..POOL_CONNECTIONS).map(connect).collect();
    for stream in &mut pool {
        stream.write_all(request.as_bytes()).expect("an open connection");
    }
    println!("connected");
    let readers = pool.split_off(1).into_iter();
    let readers: Vec<_> =
        readers.map(|stream| thread::spawn(move || print_until_end(stream))).collect();
    readers.into_iter().for_each(|reader| reader.join().expect("no panic"));
}

/// Connects to the service of the pod, once its routes are in force. Until then its address has no route.
fn connect_to_service() -> TcpStream {
    loop {
        match TcpStream::connect(SERVICE_ADDRESS) {
            Ok(stream) => return stream,
            Err(error) if error.kind() == ErrorKind::NetworkUnreachable => {
                thread::sleep(Duration::from_millis(1));
            }
            Err(error) => panic!("{error}"),
        }
    }
}

fn run_connected_client(mut stream: TcpStream) {
    let bytes = env::var(ROLE_INPUT_VARIABLE).unwrap_or_default();
    stream.write_all(bytes.as_bytes()).expect("an open connection");
    println!("connected");
    print_until_end(stream);
}

/// Prints the bytes that come on a connection, and how it ends.
fn print_until_end(mut stream: TcpStream) {
    let mut bytes = [0; 1024];
    loop {
        match stream.read(&mut bytes).map_err(|error| error.kind()) {
            Ok(read @ 1..) => println!("read: {}", bytes[..read].escape_ascii()),
            result => return println!("ended: {result:?}"),
        }
    }
}

/// Serves HTTP on port 8080 between the lines `listen` and `close`. The response is 200 after `good`, 503 after `bad`,
/// and none after `keep`. `say TEXT` writes the escaped text to kept connections; `drop` closes them. After `serve` it
/// responds to each request of a connection after a while. After `datagrams`, datagrams to that port are sent back.
pub(super) fn run_pod() {
    let (send, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            let _ = send.send(line);
        }
        // The test has ended.
        std::process::exit(0);
    });
    let (mut listener, mut status) = (None, "200 OK");
    let (mut keep, mut serve, mut connections) = (false, false, Vec::<TcpStream>::new());
    let mut pending_text = String::new();
    loop {
        match lines.try_recv().as_deref() {
            Ok("listen") => {
                let bound = TcpListener::bind("0.0.0.0:8080").expect("a free port");
                bound.set_nonblocking(true).expect("a socket");
                listener = Some(bound);
            }
            Ok("close") => listener = None,
            Ok("datagrams") => drop(thread::spawn(cluster_services::echo_datagrams)),
            Ok("good") => status = "200 OK",
            Ok("keep") => keep = true,
            Ok("serve") => serve = true,
            Ok("drop") => {
                // With those that wait to be accepted: their clients take them for open.
                while let Some(Ok(_closed)) = listener.as_ref().map(TcpListener::accept) {}
                connections.clear();
            }
            Ok(line) if line.starts_with("say ") => {
                pending_text = line["say ".len()..].replace("\\r\\n", "\r\n");
            }
            Ok("bad") => status = "503 Service Unavailable",
            _ => {}
        }
        match listener.as_ref().map(TcpListener::accept) {
            Some(Ok((stream, _))) if keep => connections.push(stream),
            Some(Ok((stream, _))) if serve => {
                drop(thread::spawn(move || pausing_clients::serve(stream)));
            }
            Some(Ok((stream, _))) => respond(stream, status),
            Some(Err(error)) if error.kind() != ErrorKind::WouldBlock => panic!("{error}"),
            Some(Err(_)) | None => thread::sleep(Duration::from_millis(1)),
        }
        // Text is written once there is a connection to write it to.
        if !connections.is_empty() {
            let text = std::mem::take(&mut pending_text);
            connections.iter_mut().for_each(|stream| drop(stream.write_all(text.as_bytes())));
        }
    }
}

fn respond(mut stream: TcpStream, status: &str) {
    let _ = stream.set_nonblocking(false);
    let mut head = Vec::new();
    let mut byte = [0];
    while !head.ends_with(b"\r\n\r\n") && stream.read(&mut byte).is_ok_and(|read| read == 1) {
        head.push(byte[0]);
    }
    let _ = write!(stream, "HTTP/1.1 {status}\r\ncontent-length: 2\r\nconnection: close\r\n\r\nok");
}
