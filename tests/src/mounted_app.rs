//! Services whose container runs `app.c`, which is in no image but mounted from a directory of the node.

use crate::images;
use crate::installed_cluster::{RouseCluster, service_manifest};
use crate::knative_features::EnabledFeatures;
use crate::shared_folder::SharedFolder;
use crate::test_cluster::HELLO_IMAGE;

/// The program, and the features that allow pods to mount it.
#[derive(Debug)]
pub struct MountedApp<'a> {
    folder: SharedFolder,
    features: EnabledFeatures<'a>,
}

impl<'a> MountedApp<'a> {
    /// Prepares the program for services of this namespace.
    pub fn new(rouse: &'a RouseCluster, namespace: &str) -> Self {
        let folder = SharedFolder::new(namespace);
        folder.write_program("app", images::test_program());
        Self {
            folder,
            features: EnabledFeatures::enable(
                &rouse.cluster,
                &["kubernetes.podspec-volumes-hostpath"],
            ),
        }
    }

    /// Manifest of a service that runs it with this argument; `annotations` are as in
    /// [`service_manifest`].
    pub fn service(&self, name: &str, annotations: &str, argument: &str) -> String {
        let container = format!(
            "image: \"{HELLO_IMAGE}\", command: [/tests/app, \"{argument}\"], \
             volumeMounts: [{{name: tests, mountPath: /tests}}]"
        );
        let path = self.folder.path();
        service_manifest(name, annotations, &container)
            + &format!(
                "      volumes: [{{name: tests, hostPath: {{path: {path}, type: Directory}}}}]\n"
            )
    }

    /// Applies manifests of such services.
    pub fn apply(&self, rouse: &RouseCluster, namespace: &str, yaml: &str) {
        self.features.apply(rouse, namespace, yaml);
    }
}
