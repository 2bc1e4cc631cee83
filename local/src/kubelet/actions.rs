//! Shell: carries out the actions of pods in tasks, which report their results as events.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use tracing::warn;

use super::{
    EventResource, KubeletResources, LocalKubelet, PodEventReport, PreparedPod, exits, lifecycle,
    prober, stop_signal,
};
use crate::images::ImagePullPolicy;
use crate::pods::{PodAction, PodEvent, ProbeResults};

impl LocalKubelet {
    /// Carries out one action of a pod, in a task of its own where it takes time.
    pub(super) fn carry_out(&self, uid: &str, action: PodAction) {
        let Some(managed_pod) = self.pods.get(uid) else { return };
        let (resources, prepared) = (Arc::clone(&self.shared), Arc::clone(&managed_pod.prepared));
        match action {
            PodAction::CreateNetwork => {
                self.spawn_task(uid, lifecycle::create_network(resources, uid.to_owned()))
            }
            PodAction::Pull(index) => self.spawn_task(uid, pull_image(resources, prepared, index)),
            PodAction::Start(index) => {
                let Some(image) = managed_pod.images[index].clone() else {
                    // Not expected: the machine starts a container only after `ImageReady`, which brings the image.
                    return self.spawn_task(uid, pull_image(resources, prepared, index));
                };
                let request = lifecycle::ContainerStartRequest {
                    index,
                    restarts: managed_pod.pod.restarts(index),
                    addresses: managed_pod.pod.addresses().to_vec(),
                    image,
                    received_at: managed_pod.received_at,
                };
                self.spawn_container(uid.to_owned(), prepared, request);
            }
            PodAction::Terminate(index) => {
                if let Some(fd) = &managed_pod.pidfds[index] {
                    let name = &prepared.containers[index].name;
                    let bundle = resources.layout.bundle(uid, name);
                    stop_signal::send_stop_signal(&bundle, fd.as_fd());
                }
            }
            PodAction::Kill(index) => {
                let name = &prepared.containers[index].name;
                warn!(
                    pod = prepared.pod_spec.name,
                    uid,
                    container = name,
                    "killed after its grace period"
                );
                resources.cgroups.kill_container(&resources.layout, uid, name);
            }
            PodAction::Remove => self.spawn_task(
                uid,
                lifecycle::remove_pod(resources, uid.to_owned(), managed_pod.address),
            ),
        }
    }

    /// Starts a container in a task, which then runs its probes and reports its exit.
    fn spawn_container(
        &self,
        uid: String,
        prepared: Arc<PreparedPod>,
        request: lifecycle::ContainerStartRequest,
    ) {
        let (resources, reports) = (Arc::clone(&self.shared), self.reports.clone());
        let (index, addresses, restarts) =
            (request.index, request.addresses.clone(), request.restarts);
        tokio::spawn(async move {
            let name = prepared.containers[index].name.clone();
            let id = lifecycle::container_id(&uid, &name, restarts);
            let (event, resource) =
                lifecycle::start_container(&resources, &prepared, request).await;
            let process = match &resource {
                EventResource::Process(fd) => Some(Arc::clone(fd)),
                _ => None,
            };
            let _ = reports.send(PodEventReport { uid: uid.clone(), event, resource }).await;
            // Probes begin after the start is reported; their results would otherwise come before `Started`.
            let Some(fd) = process else { return };
            let results = ProbeResults::default();
            let pidfd = Arc::clone(&fd);
            let run = prober::ContainerRun { index, restarts, pidfd, addresses, results };
            tokio::spawn(prober::probe_container(
                Arc::clone(&resources),
                prepared,
                reports.clone(),
                run,
            ));
            // The same task reports the exit, so that it comes after the start.
            exits::report_exit(resources, reports, uid, name, index, Some(fd), id).await;
        });
    }

    /// Runs work of a pod in a task and reports its event.
    fn spawn_task(
        &self,
        uid: &str,
        future: impl Future<Output = (PodEvent, EventResource)> + Send + 'static,
    ) {
        let (reports, uid) = (self.reports.clone(), uid.to_owned());
        tokio::spawn(async move {
            let (event, resource) = future.await;
            // The channel is closed once the kubelet has ended; the report is not needed then.
            let _ = reports.send(PodEventReport { uid, event, resource }).await;
        });
    }

    /// Waits in a task for the exit of an adopted container.
    pub(super) fn watch_exit(
        &self,
        uid: &str,
        name: &str,
        index: usize,
        fd: Arc<OwnedFd>,
        id: String,
    ) {
        let (resources, reports) = (Arc::clone(&self.shared), self.reports.clone());
        let (uid, name) = (uid.to_owned(), name.to_owned());
        tokio::spawn(exits::report_exit(resources, reports, uid, name, index, Some(fd), id));
    }

    /// Reports the exit of a container that ended while no process of the node ran. Its code is not known.
    pub(super) fn report_missed_exit(&self, uid: &str, name: &str, index: usize, id: String) {
        let (resources, reports) = (Arc::clone(&self.shared), self.reports.clone());
        let (uid, name) = (uid.to_owned(), name.to_owned());
        tokio::spawn(exits::report_exit(resources, reports, uid, name, index, None, id));
    }
}

/// Pulls or finds the image of a container.
async fn pull_image(
    resources: Arc<KubeletResources>,
    prepared: Arc<PreparedPod>,
    index: usize,
) -> (PodEvent, EventResource) {
    let container = &prepared.containers[index];
    let name = container.image.clone().unwrap_or_default();
    let policy = ImagePullPolicy::from_spec(container.image_pull_policy.as_deref(), &name);
    let image = name.clone();
    let result = tokio::task::spawn_blocking(move || resources.images.get(&image, policy)).await;
    let image_failed = |reason: &str, message: String| {
        (PodEvent::ImageFailed { index, reason: reason.to_owned(), message }, EventResource::None)
    };
    match result {
        Ok(Ok(image)) => (
            PodEvent::ImageReady { index, digest: image.digest.clone() },
            EventResource::Image(image),
        ),
        Ok(Err(error)) => {
            let message = lifecycle::error_chain(&error);
            // Kubernetes shows the back-off, not the failed attempt, while a container waits for its next pull.
            match error.reason() {
                "ErrImagePull" => {
                    image_failed("ImagePullBackOff", format!("Back-off pulling: {message}"))
                }
                reason => image_failed(reason, message),
            }
        }
        Err(_) => image_failed("ImagePullBackOff", format!("unpacking image {name} panicked")),
    }
}
