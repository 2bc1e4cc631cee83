use std::time::{Duration, Instant};

use common::local_node::{ContainerRunState, PodRunPhase};

use super::*;

fn plan(name: &str, role: ContainerRole) -> ContainerPlan {
    ContainerPlan { name: name.to_owned(), role, is_probed: false }
}

fn exit(code: i32) -> ContainerExit {
    ContainerExit { code, reason: "Error".to_owned(), message: "no config\n".to_owned() }
}

fn seconds(count: u64) -> Duration {
    Duration::from_secs(count)
}

/// Returns a pod with one running container.
fn running(now: Instant) -> PodStateMachine {
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    assert_eq!(pod.step(now, PodEvent::Begin), [PodAction::CreateNetwork, PodAction::Pull(0)]);
    assert_eq!(pod.step(now, PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() }), []);
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    assert_eq!(pod.phase(), PodRunPhase::Pending);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), []);
    assert_eq!(pod.phase(), PodRunPhase::Running);
    pod
}

#[test]
fn restarts_back_off_from_at_once_to_five_minutes_and_forget_after_ten() {
    let mut now = Instant::now();
    let mut pod = running(now);
    for wait in [0, 10, 20, 40, 80, 160, 300, 300] {
        let actions = pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) });
        if wait > 0 {
            assert_eq!(actions, []);
            assert_eq!(pod.next_tick_at(), Some(now + seconds(wait)));
            assert_eq!(pod.step(now + seconds(wait) - seconds(1), PodEvent::Tick), []);
            now += seconds(wait);
            assert_eq!(pod.step(now, PodEvent::Tick), [PodAction::Start(0)], "after {wait} s");
        } else {
            assert_eq!(actions, [PodAction::Start(0)]);
        }
        pod.step(now, PodEvent::Started { index: 0 });
    }
    assert_eq!(pod.restarts(0), 8);
    now += seconds(601);
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) }), [PodAction::Start(0)]);
}

#[test]
fn a_crashing_container_says_why_it_waits() {
    let now = Instant::now();
    let mut pod = running(now);
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(3) });
    let state = ContainerRunState::Waiting {
        reason: "ContainerCreating".to_owned(),
        message: "Error with code 3: no config; started again at once".to_owned(),
        last_exit: Some(3),
    };
    assert_eq!(
        pod.container_statuses()[0].state,
        state,
        "the reason is known while it starts again"
    );
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(3) });
    let state = ContainerRunState::Waiting {
        reason: "CrashLoopBackOff".to_owned(),
        message: "Error with code 3: no config; started again after 10 s".to_owned(),
        last_exit: Some(3),
    };
    assert_eq!(pod.container_statuses()[0].state, state);
    assert_eq!(pod.phase(), PodRunPhase::Running);
}

#[test]
fn a_missing_image_is_asked_for_again_later() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    pod.step(now, PodEvent::NetworkReady(Vec::new()));
    let failed = || PodEvent::ImageFailed {
        index: 0,
        reason: "ImagePullBackOff".to_owned(),
        message: "not found".to_owned(),
    };
    assert_eq!(pod.step(now, failed()), []);
    assert_eq!(pod.next_tick_at(), Some(now + seconds(10)));
    assert_eq!(pod.step(now + seconds(10), PodEvent::Tick), [PodAction::Pull(0)]);
    pod.step(now + seconds(10), failed());
    assert_eq!(pod.next_tick_at(), Some(now + seconds(30)));
    let ready = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
    assert_eq!(pod.step(now + seconds(30), ready), [PodAction::Start(0)]);
    assert_eq!(pod.restarts(0), 0);
}

#[test]
fn a_stopped_pod_is_asked_then_killed_then_removed() {
    let now = Instant::now();
    let mut pod = running(now);
    assert_eq!(pod.step(now, PodEvent::Stop), [PodAction::Terminate(0)]);
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(
        (pod.phase(), pod.next_tick_at()),
        (PodRunPhase::Terminating, Some(now + seconds(30)))
    );
    assert_eq!(pod.step(now + seconds(29), PodEvent::Tick), []);
    assert_eq!(pod.step(now + seconds(30), PodEvent::Tick), [PodAction::Kill(0)]);
    assert_eq!(pod.next_tick_at(), None);
    let exited = PodEvent::Exited { index: 0, exit: exit(137) };
    assert_eq!(pod.step(now + seconds(30), exited), [PodAction::Remove]);
    assert_eq!(pod.step(now + seconds(30), PodEvent::Removed), []);
    assert_eq!(pod.phase(), PodRunPhase::Removed);
}

#[test]
fn a_pod_stopped_while_it_starts_leaves_nothing_behind() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), []);
    let image = PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() };
    assert_eq!(pod.step(now, image), [PodAction::Remove]);

    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.step(now, PodEvent::Begin);
    pod.step(now, PodEvent::NetworkReady(Vec::new()));
    pod.step(now, PodEvent::ImageReady { index: 0, digest: "sha256:1".to_owned() });
    assert_eq!(pod.step(now, PodEvent::Stop), []);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), [PodAction::Terminate(0)]);
}

#[test]
fn init_containers_run_one_after_another_and_sidecars_stay() {
    let now = Instant::now();
    let plans = vec![
        plan("first", ContainerRole::Init),
        plan("side", ContainerRole::Sidecar),
        plan("web", ContainerRole::Main),
    ];
    let mut pod = PodStateMachine::new(RestartPolicy::Always, None, plans);
    pod.step(now, PodEvent::Begin);
    for index in 0..3 {
        pod.step(now, PodEvent::ImageReady { index, digest: "sha256:1".to_owned() });
    }
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), []);
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(0) }), [PodAction::Start(1)]);
    assert_eq!(pod.step(now, PodEvent::Started { index: 1 }), [PodAction::Start(2)]);
    pod.step(now, PodEvent::Started { index: 2 });
    assert_eq!(pod.phase(), PodRunPhase::Running);
    assert_eq!(pod.step(now, PodEvent::Stop), [PodAction::Terminate(2)]);
    assert_eq!(
        pod.step(now, PodEvent::Exited { index: 2, exit: exit(0) }),
        [PodAction::Terminate(1)]
    );
    assert_eq!(pod.step(now, PodEvent::Exited { index: 1, exit: exit(0) }), [PodAction::Remove]);
}

#[test]
fn the_restart_policy_decides_if_a_container_starts_again() {
    let now = Instant::now();
    for (restart, code, restarts) in [
        (RestartPolicy::Always, 0, true),
        (RestartPolicy::OnFailure, 0, false),
        (RestartPolicy::OnFailure, 1, true),
        (RestartPolicy::Never, 1, false),
    ] {
        let mut pod = running(now);
        pod.restart = restart;
        let actions = pod.step(now, PodEvent::Exited { index: 0, exit: exit(code) });
        assert_eq!(!actions.is_empty(), restarts, "{restart:?} {code}");
    }
}

#[test]
fn an_adopted_container_is_not_started_twice() {
    let now = Instant::now();
    let mut pod =
        PodStateMachine::new(RestartPolicy::Always, None, vec![plan("web", ContainerRole::Main)]);
    pod.adopt_container(0, 2, ProbeResults::default(), true);
    pod.network = PodNetworkState::Ready(Vec::new());
    assert_eq!(pod.step(now, PodEvent::Begin), [PodAction::Pull(0)], "no start");
    assert_eq!((pod.phase(), pod.restarts(0)), (PodRunPhase::Running, 2));
}

fn probed(attempt: u32, started: bool, ready: bool) -> PodEvent {
    PodEvent::ProbesChanged { index: 0, attempt, results: ProbeResults { started, ready } }
}

/// Returns a pod of a probed sidecar and a main container; images and network are ready.
fn pod_with_probed_sidecar(now: Instant) -> PodStateMachine {
    let sidecar = ContainerPlan { is_probed: true, ..plan("proxy", ContainerRole::Sidecar) };
    let mut pod = PodStateMachine::new(
        RestartPolicy::Always,
        None,
        vec![sidecar, plan("web", ContainerRole::Main)],
    );
    pod.step(now, PodEvent::Begin);
    for index in [0, 1] {
        pod.step(now, PodEvent::ImageReady { index, digest: "sha256:1".to_owned() });
    }
    assert_eq!(pod.step(now, PodEvent::NetworkReady(Vec::new())), [PodAction::Start(0)]);
    pod
}

#[test]
fn a_pod_without_probes_is_ready_with_its_processes() {
    let now = Instant::now();
    let mut pod = running(now);
    assert!(pod.is_ready());
    pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) });
    assert!(!pod.is_ready());
}

#[test]
fn what_comes_after_a_sidecar_waits_for_its_startup_probe_and_the_pod_for_its_readiness() {
    let now = Instant::now();
    let mut pod = pod_with_probed_sidecar(now);
    assert_eq!(pod.step(now, PodEvent::Started { index: 0 }), [], "it may not have started yet");
    assert_eq!(pod.step(now, probed(0, true, false)), [PodAction::Start(1)]);
    pod.step(now, PodEvent::Started { index: 1 });
    assert!(!pod.is_ready());
    pod.step(now, probed(0, true, true));
    assert!(pod.is_ready());
    pod.step(now, probed(0, true, false));
    assert!(!pod.is_ready());
    assert_eq!(pod.phase(), PodRunPhase::Running);
}

#[test]
fn probe_results_of_an_earlier_run_are_ignored() {
    let now = Instant::now();
    let mut pod = pod_with_probed_sidecar(now);
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, probed(0, true, true));
    pod.step(now, PodEvent::Started { index: 1 });
    assert_eq!(pod.step(now, PodEvent::Exited { index: 0, exit: exit(1) }), [PodAction::Start(0)]);
    pod.step(now, PodEvent::Started { index: 0 });
    pod.step(now, probed(0, true, true));
    assert!(!pod.is_ready(), "reported for the run before");
    pod.step(now, probed(1, true, true));
    assert!(pod.is_ready());
}

#[test]
fn an_adopted_pod_is_as_ready_as_it_was() {
    let now = Instant::now();
    let web = ContainerPlan { is_probed: true, ..plan("web", ContainerRole::Main) };
    let mut pod = PodStateMachine::new(RestartPolicy::Always, None, vec![web]);
    pod.adopt_network(Vec::new());
    pod.adopt_container(0, 2, ProbeResults { started: true, ready: true }, true);
    pod.step(now, PodEvent::Begin);
    assert!(pod.is_ready());
    pod.step(now, PodEvent::Stop);
    assert!(!pod.is_ready(), "a pod that stops gets no requests");
}
