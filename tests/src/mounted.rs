//! Services whose container runs `app.c`, which is in no image but mounted from a directory of the node.

use crate::features::Features;
use crate::folder::Folder;
use crate::installed::{HELLO, Installed, service};
use crate::node;

/// The program, and the features that allow pods to mount it.
#[derive(Debug)]
pub struct MountedApp<'a> {
    folder: Folder,
    features: Features<'a>,
}

impl<'a> MountedApp<'a> {
    /// Prepares the program for services of this namespace.
    pub fn new(rouse: &'a Installed, namespace: &str) -> Self {
        let folder = Folder::new(namespace);
        folder.put_program("app", node::program());
        Self {
            folder,
            features: Features::on(&rouse.cluster, &["kubernetes.podspec-volumes-hostpath"]),
        }
    }

    /// Manifest of a service that runs it with this argument; `annotations` are as in [`service`].
    pub fn service(&self, name: &str, annotations: &str, argument: &str) -> String {
        let container = format!(
            "image: \"{HELLO}\", command: [/tests/app, \"{argument}\"], \
             volumeMounts: [{{name: tests, mountPath: /tests}}]"
        );
        let path = self.folder.path();
        service(name, annotations, &container)
            + &format!(
                "      volumes: [{{name: tests, hostPath: {{path: {path}, type: Directory}}}}]\n"
            )
    }

    /// Applies manifests of such services.
    pub fn apply(&self, rouse: &Installed, namespace: &str, yaml: &str) {
        self.features.apply(rouse, namespace, yaml);
    }
}
