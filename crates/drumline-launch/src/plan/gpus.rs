//! How many GPUs a program on this node would see: pure functions of the device files and `CUDA_VISIBLE_DEVICES`.

use std::collections::HashSet;

/// The number of GPUs, from the names in `/dev`: `nvidia0`, `nvidia1` and so on.
pub fn installed_gpus<'a>(device_files: impl IntoIterator<Item = &'a str>) -> usize {
    let number = |name: &&str| name.strip_prefix("nvidia").is_some_and(|rest| rest.parse::<u32>().is_ok());
    device_files.into_iter().filter(number).count()
}

/// The GPUs that the driver shows to a program, in the format of `CUDA_VISIBLE_DEVICES`: numbers, or names such as
/// `GPU-5ebe`. The driver stops at the first that does not exist, and shows none if one is named twice.
pub fn visible_gpus(installed: usize, cuda_visible_devices: Option<&str>) -> Vec<String> {
    let Some(list) = cuda_visible_devices else {
        return (0..installed).map(|gpu| gpu.to_string()).collect();
    };
    let exists = |gpu: &&str| match gpu.parse::<i64>() {
        Ok(number) => usize::try_from(number).is_ok_and(|number| number < installed),
        Err(_) => installed > 0 && (gpu.starts_with("GPU-") || gpu.starts_with("MIG-")),
    };
    let shown: Vec<_> = list.split(',').map(str::trim).take_while(exists).map(str::to_string).collect();
    let all_different = shown.iter().collect::<HashSet<_>>().len() == shown.len();
    if all_different { shown } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_files_are_counted() {
        let dev = ["null", "nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-modeset", "nvidia12"];
        assert_eq!(installed_gpus(dev), 3);
        assert_eq!(installed_gpus(["tty0"]), 0);
    }

    #[test]
    fn the_variable_narrows_as_the_driver_does() {
        let visible = |list| visible_gpus(4, list).len();
        assert_eq!(visible(None), 4);
        assert_eq!([Some(""), Some("-1"), Some("7"), Some("0,0"), Some("none")].map(visible), [0; 5]);
        assert_eq!([Some("2"), Some("3,1"), Some("0,9,1"), Some("0, 1,2")].map(visible), [1, 2, 1, 3]);
        assert_eq!(visible(Some("GPU-1a,MIG-2b")), 2);
        assert!(visible_gpus(0, Some("GPU-1a")).is_empty() && visible_gpus(0, None).is_empty());
        assert_eq!(visible_gpus(4, Some("3,1")), ["3", "1"]);
    }
}
