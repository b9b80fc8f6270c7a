//! Which device to run on: `auto`, `cpu`, `wgpu[:i]`, `vulkan[:i]`, `metal[:i]`, `cuda[:i]`.

use std::fmt;
use std::str::FromStr;

use burn::tensor::Device;
#[cfg(any(feature = "cuda", feature = "wgpu", feature = "flex"))]
use burn::tensor::DeviceType;

use crate::{Error, Result};

/// A device as asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceChoice {
    /// CUDA, then a hardware GPU, then the CPU.
    #[default]
    Auto,
    /// The CPU.
    Cpu,
    /// Any wgpu adapter, by index; software ones come last.
    Wgpu(usize),
    /// A Vulkan GPU, through SPIR-V.
    Vulkan(usize),
    /// A Metal GPU.
    Metal(usize),
    /// A CUDA GPU.
    Cuda(usize),
}

impl DeviceChoice {
    /// The choice of the process that is the `local`-th of its host, where processes have a GPU
    /// each. Other devices they share.
    #[must_use]
    pub fn of_process(self, local: usize) -> Self {
        match self {
            Self::Auto if enumerate("cuda").is_some_and(|found| !found.is_empty()) => {
                Self::Cuda(local)
            }
            Self::Cuda(0) => Self::Cuda(local),
            other => other,
        }
    }
}

const NAMES: [&str; 6] = ["auto", "cpu", "wgpu", "vulkan", "metal", "cuda"];

impl FromStr for DeviceChoice {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let unknown = || Error::UnknownDevice {
            requested: text.to_string(),
            suggestion: nearest(text),
            available: available_devices().join(", "),
        };
        let (name, index) = match text.split_once(':') {
            Some((name, index)) => (name, Some(index.parse::<usize>().map_err(|_| unknown())?)),
            None => (text, None),
        };
        let number = index.unwrap_or(0);
        match (name, index) {
            ("auto", None) => Ok(Self::Auto),
            ("cpu" | "flex", None) => Ok(Self::Cpu),
            ("wgpu", _) => Ok(Self::Wgpu(number)),
            ("vulkan", _) => Ok(Self::Vulkan(number)),
            ("metal", _) => Ok(Self::Metal(number)),
            ("cuda", _) => Ok(Self::Cuda(number)),
            _ => Err(unknown()),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Cpu => f.write_str("cpu"),
            Self::Wgpu(index) => write!(f, "wgpu:{index}"),
            Self::Vulkan(index) => write!(f, "vulkan:{index}"),
            Self::Metal(index) => write!(f, "metal:{index}"),
            Self::Cuda(index) => write!(f, "cuda:{index}"),
        }
    }
}

fn nearest(text: &str) -> String {
    let name = text.split(':').next().unwrap_or(text);
    NAMES
        .iter()
        .map(|known| (strsim::damerau_levenshtein(name, known), known))
        .filter(|(distance, _)| *distance <= 2)
        .min()
        .map(|(_, known)| format!(" (did you mean `{known}`?)"))
        .unwrap_or_default()
}

/// Opens the chosen device.
///
/// ```
/// use kv_core::{DeviceChoice, device_name, select_device};
///
/// let choice: DeviceChoice = "cpu".parse()?; // or `auto`, `cuda:1`, `vulkan`, ...
/// let device = select_device(choice)?;
/// println!("on {}", device_name(&device));
/// # Ok::<(), kv_core::Error>(())
/// ```
///
/// # Errors
/// [`Error::BackendNotCompiled`] names the cargo feature to enable, [`Error::DeviceNotFound`] what
/// is there instead.
pub fn select_device(choice: DeviceChoice) -> Result<Device> {
    let (feature, index) = match choice {
        DeviceChoice::Auto => return automatic(),
        DeviceChoice::Cpu => ("flex", 0),
        DeviceChoice::Wgpu(index) => ("wgpu", index),
        DeviceChoice::Vulkan(index) => ("vulkan", index),
        DeviceChoice::Metal(index) => ("metal", index),
        DeviceChoice::Cuda(index) => ("cuda", index),
    };
    let Some(devices) = enumerate(feature) else {
        return Err(Error::BackendNotCompiled {
            requested: choice.to_string(),
            feature,
            available: available_devices().join(", "),
        });
    };
    let found = devices.len();
    let device = devices.into_iter().nth(index).ok_or_else(|| Error::DeviceNotFound {
        requested: choice.to_string(),
        reason: format!("{found} such devices were found"),
        available: available_devices().join(", "),
    })?;
    // SPIR-V crashes inside software drivers, and with `vulkan` compiled in wgpu prefers it.
    let spirv = cfg!(feature = "vulkan") && matches!(feature, "vulkan" | "wgpu");
    if spirv && is_software(&device) {
        return Err(Error::DeviceNotFound {
            requested: choice.to_string(),
            reason: format!(
                "{} is a software adapter, which only builds with `wgpu` and without `vulkan` \
                 can use",
                device_name(&device)
            ),
            available: "cpu".into(),
        });
    }
    Ok(device)
}

/// Devices of this machine that this build can use, as `--device` takes them.
pub fn available_devices() -> Vec<String> {
    let mut names = vec!["auto".to_string()];
    for (feature, prefix) in [
        ("flex", "cpu"),
        ("wgpu", "wgpu"),
        ("vulkan", "vulkan"),
        ("metal", "metal"),
        ("cuda", "cuda"),
    ] {
        let count = enumerate(feature).map_or(0, |devices| devices.len());
        match prefix {
            "cpu" if count > 0 => names.push("cpu".into()),
            _ => names.extend((0..count).map(|index| format!("{prefix}:{index}"))),
        }
    }
    names
}

/// A device's name for reports: the GPU's own, or `cpu`.
pub fn device_name(device: &Device) -> String {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    if let Some(identity) = device.identity() {
        return identity.name;
    }
    let _ = device;
    "cpu".into()
}

/// Whether a device is the CPU, where ops run in loops of the host.
pub fn is_cpu(device: &Device) -> bool {
    #[cfg(any(feature = "cuda", feature = "wgpu"))]
    return device.identity().is_none();
    #[cfg(not(any(feature = "cuda", feature = "wgpu")))]
    {
        let _ = device;
        true
    }
}

fn automatic() -> Result<Device> {
    for feature in ["cuda", "vulkan", "metal", "wgpu"] {
        let devices = enumerate(feature).unwrap_or_default();
        if let Some(device) = devices.into_iter().find(|device| !is_software(device)) {
            return Ok(device);
        }
    }
    let cpu = enumerate("flex").unwrap_or_default().into_iter().next();
    cpu.ok_or_else(|| Error::DeviceNotFound {
        requested: "auto".into(),
        reason: "no GPU was found and the CPU backend (`flex`) is not compiled in".into(),
        available: available_devices().join(", "),
    })
}

/// The devices of one backend; `None` where it is not compiled in. Enumerating is safe without a
/// driver, unlike opening a device that is not there.
fn enumerate(feature: &str) -> Option<Vec<Device>> {
    #[allow(unused_mut, unused_assignments)]
    let mut devices: Option<Vec<Device>> = None;
    #[cfg(feature = "flex")]
    if feature == "flex" {
        devices = Some(Device::enumerate(DeviceType::Flex).into_vec());
    }
    #[cfg(feature = "cuda")]
    if feature == "cuda" {
        devices = Some(Device::enumerate(DeviceType::Cuda).into_vec());
    }
    #[cfg(feature = "wgpu")]
    if feature == "wgpu" {
        devices = Some(Device::enumerate(DeviceType::Wgpu).into_vec());
    }
    #[cfg(feature = "vulkan")]
    if feature == "vulkan" {
        devices = Some(Device::enumerate(DeviceType::Vulkan).into_vec());
    }
    #[cfg(feature = "metal")]
    if feature == "metal" {
        devices = Some(Device::enumerate(DeviceType::Metal).into_vec());
    }
    devices
}

/// Whether a device is a software rasteriser.
fn is_software(device: &Device) -> bool {
    #[cfg(any(feature = "wgpu", feature = "cuda"))]
    return device.identity().is_some_and(|identity| identity.physical.is_none());
    #[cfg(not(any(feature = "wgpu", feature = "cuda")))]
    {
        let _ = device;
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_parse_and_typos_are_helped() {
        assert_eq!("cuda:1".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cuda(1));
        assert_eq!("cpu".parse::<DeviceChoice>().unwrap(), DeviceChoice::Cpu);
        let error = "vulcan".parse::<DeviceChoice>().unwrap_err().to_string();
        assert!(error.contains("did you mean `vulkan`"), "{error}");
        assert!("cuda:x".parse::<DeviceChoice>().is_err());
    }

    #[test]
    #[cfg(not(feature = "cuda"))]
    fn a_missing_backend_names_its_feature() {
        let error = select_device(DeviceChoice::Cuda(0)).unwrap_err().to_string();
        assert!(error.contains("cargo feature `cuda`"), "{error}");
    }

    #[test]
    #[cfg(feature = "flex")]
    fn the_cpu_is_always_there() {
        select_device(DeviceChoice::Cpu).unwrap();
        select_device(DeviceChoice::Auto).unwrap();
    }
}
