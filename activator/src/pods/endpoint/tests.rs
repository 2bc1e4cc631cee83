#![allow(clippy::unwrap_used, reason = "tests")]

use std::cell::Cell;

use common::{fixtures::standby_order, standby_watch::StandbyWatchAction};
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpSocket};

use super::*;

const PROTOCOLS: [AppProtocol; 3] = [AppProtocol::Http1, AppProtocol::H2c, AppProtocol::Tcp];

fn create_pod(address: SocketAddr, protocol: AppProtocol) -> Arc<PodEndpoint> {
    let settings = PodConnectionSettings {
        listen_backlog: 128,
        max_idle: Duration::from_secs(1),
        metrics: ActivatorMetrics::register(&mut Registry::default()),
    };
    let identity = PodIdentity { uid: "uid".into(), name: "name".into() };
    let key = PodEndpointKey { service_port: None, address, id: 1 };
    Arc::new(PodEndpoint::new(key, identity, protocol, settings))
}

/// Starts a listener that sends no SYN-ACK while the connections in its accept queue are kept. A backlog of 1 holds
/// two, and SYNs beyond it are dropped.
async fn start_silent_listener() -> (TcpListener, SocketAddr, [TcpStream; 2]) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let plugs =
        [TcpStream::connect(address).await.unwrap(), TcpStream::connect(address).await.unwrap()];
    (listener, address, plugs)
}

/// A WebSocket to a pod that speaks HTTP/2 has a dial of its own, in HTTP/1.1. So has each other protocol.
#[tokio::test]
async fn dials_for_one_and_for_all_count_alike() {
    for protocol in PROTOCOLS {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let pod = create_pod(address, AppProtocol::H2c);
        let metrics = &pod.settings.metrics;
        let pauses = [pod.record_failed_dial(), pod.record_failed_dial()];
        assert_eq!(pauses, [FIRST_DIAL_FAILURE_PAUSE, FIRST_DIAL_FAILURE_PAUSE * 2]);
        pod.connect(protocol, || false).await.unwrap();
        assert_eq!(pod.record_failed_dial(), FIRST_DIAL_FAILURE_PAUSE, "it accepts again");
        assert_eq!((metrics.dials.get(), metrics.dial_failures.get()), (1, 0));

        drop(listener);
        let gone = create_pod(address, AppProtocol::H2c);
        let metrics = &gone.settings.metrics;
        assert!(gone.connect(protocol, || false).await.is_err());
        assert_eq!((metrics.dials.get(), metrics.dial_failures.get()), (1, 1));
    }
}

/// No pod is better at first; one opens in the third second of the dial.
#[tokio::test(start_paused = true)]
async fn a_late_dial_ends_for_a_request_once_another_pod_is_better() {
    for protocol in PROTOCOLS {
        let (_silent, address, _plugs) = start_silent_listener().await;
        let pod = create_pod(address, AppProtocol::H2c);
        let asked = Cell::new(0);
        let prefers_other = || {
            asked.set(asked.get() + 1);
            asked.get() == 3
        };
        let error = pod.connect(protocol, prefers_other).await.unwrap_err();
        assert!(matches!(error, PodDialError::Unanswered), "{error}");
        let error = pod.connect(protocol, || false).await.unwrap_err();
        assert!(matches!(error, PodDialError::Failed(_)), "{error}");
    }
}

/// The first request is gone after 100 ms, and its entry is still in the pool.
#[tokio::test(start_paused = true)]
async fn a_late_dial_tells_the_first_request_that_still_waits() {
    let (_silent, address, _plugs) = start_silent_listener().await;
    let pod = create_pod(address, AppProtocol::H2c);
    let started = tokio::time::Instant::now();
    let first = pod.connect(AppProtocol::H2c, || false);
    assert!(tokio::time::timeout(Duration::from_millis(100), first).await.is_err());
    let error = pod.connect(AppProtocol::H2c, || true).await.unwrap_err();
    assert!(matches!(error, PodDialError::Unanswered), "{error}");
    assert!(started.elapsed() < LATE_DIAL_TIMEOUT * 2, "{:?}", started.elapsed());
}

/// The pod's accept queue is full, and no process empties it. No other pod is open yet.
#[tokio::test]
async fn requests_without_a_connection_leave_a_pod_that_is_passed_over() {
    let (_silent, address, _plugs) = start_silent_listener().await;
    let pod = create_pod(address, AppProtocol::H2c);
    let agent_timeout = Duration::from_millis(20);
    pod.set_standby(Some(StandbyOrder { agent_timeout, ..standby_order() }));
    assert!(pod.standby_watch.start_use());
    let pass_over = async {
        loop {
            match pod.standby_watch.next_action().await.unwrap() {
                // No agent serves there.
                StandbyWatchAction::Query(number) => {
                    pod.standby_watch.start_query([127, 80, 21, 2].into(), number);
                }
                StandbyWatchAction::PassOver => break pod.redirect_waiters(),
                StandbyWatchAction::UseAgain => panic!("nothing shows that it runs"),
            }
        }
    };
    let (connected, ()) = tokio::join!(pod.connect(AppProtocol::H2c, || false), pass_over);
    let error = connected.unwrap_err();
    assert!(matches!(error, PodDialError::Unanswered), "{error}");
}

/// A server of raw TCP that speaks first would notice each socket that is closed unused.
#[tokio::test]
async fn an_unanswered_dial_of_raw_tcp_opens_no_second_socket() {
    for protocol in PROTOCOLS {
        let (listener, address, _plugs) = start_silent_listener().await;
        let pod = create_pod(address, protocol);
        tokio::time::pause();
        let dialling = Arc::clone(&pod);
        let dialled = tokio::spawn(async move { dialling.connect(protocol, || false).await });
        tokio::time::sleep(Duration::from_millis(100)).await;
        // The two connections that fill the accept queue make room, and the kernel repeats the SYN of the socket.
        for _ in 0..2 {
            listener.accept().await.unwrap();
        }
        tokio::time::resume();
        dialled.await.unwrap().unwrap();
        let has_repeated = pod.settings.metrics.dial_repeats.get() > 0;
        assert_eq!(has_repeated, protocol != AppProtocol::Tcp, "{protocol:?}");
    }
}
