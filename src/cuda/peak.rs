//! Dense peak FLOP/s of NVIDIA GPUs by SKU, the denominator of MFU, and which have NVLink to all GPUs
//! of their node.

use super::{Arithmetic, Precision};

/// The dense peaks of a GPU in TFLOP/s. On all tensor cores of this table TF32 has half the rate of
/// bf16.
struct Sku {
    /// A part of the driver's name of the device.
    name: &'static str,
    /// Tensor cores with bf16 operands and f32 sums, without sparsity.
    bf16: f64,
    /// FMAs in f32.
    f32: f64,
}

const fn sku(name: &'static str, bf16: f64, f32: f64) -> Sku {
    Sku { name, bf16, f32 }
}

/// Values from NVIDIA's data sheets, or half of them if a sheet gives only the rate with sparsity.
/// The first matching name is used, so longer names come before their prefixes. Sheets: "H100
/// Tensor Core GPU" (SXM, PCIe, NVL), "H200 Tensor Core GPU" (SXM, NVL), "GH200 Grace Hopper
/// Superchip", "DGX B200" and "GB200 NVL72" (per GPU), "A100 Tensor Core GPU", "A40", "A30", "A10",
/// "L40S", "L40", "L4"; for GeForce and RTX the appendices of the white papers of GA102 and AD102
/// (tensor rates with f32 accumulation).
const SKUS: [Sku; 21] = [
    sku("GB200", 2500.0, 80.0),
    sku("B200", 2250.0, 75.0),
    sku("GH200", 989.4, 66.9),
    sku("H200 NVL", 835.5, 60.0),
    sku("H200", 989.4, 66.9),
    sku("H100 NVL", 835.5, 60.0),
    sku("H100 PCIe", 756.4, 51.2),
    sku("H100", 989.4, 66.9),
    sku("H800 PCIe", 756.4, 51.2),
    sku("H800", 989.4, 66.9),
    sku("H20", 148.0, 44.0),
    sku("A100", 311.9, 19.5),
    sku("A800", 311.9, 19.5),
    sku("A40", 149.7, 37.4),
    sku("A30", 165.1, 10.3),
    sku("A10", 125.0, 31.2),
    sku("L40S", 362.1, 91.6),
    sku("L40", 181.1, 90.5),
    sku("L4", 121.0, 30.3),
    sku("RTX 4090", 165.2, 82.6),
    sku("RTX 3090", 71.0, 35.6),
];

/// The SKUs whose boards (SXM, HGX, GB200) connect all GPUs of a node by NVLink, and the words of the
/// names of their variants for PCIe slots, which have no such boards.
const NVLINK: [&str; 8] = ["GB200", "B200", "H200", "H100", "H800", "H20", "A100", "A800"];
const SLOTS: [&str; 4] = ["PCIe", "PCIE", "NVL", "MIG"];

/// The bytes per second (bus bandwidth) that an all-reduce of such a node exceeds, if the GPUs use
/// their links: a fraction of any generation's, and more than PCIe carries.
const NVLINK_BANDWIDTH: u64 = 50_000_000_000;

/// Returns the bytes per second (bus bandwidth) that an all-reduce inside a node exceeds, or `None` if
/// the device that the driver calls `name` is not known to have NVLink there.
pub(super) fn bus_bandwidth(name: &str) -> Option<u64> {
    let mut words = name.split([' ', '-']);
    let has_link = words.clone().any(|word| NVLINK.contains(&word));
    (has_link && !words.any(|word| SLOTS.contains(&word))).then_some(NVLINK_BANDWIDTH)
}

/// Returns the dense peak in FLOP/s of the device that the driver calls `name`, if it is in the
/// table. MIG instances have none.
pub(super) fn flops(name: &str, precision: Precision) -> Option<f64> {
    let words: Vec<&str> = name.split([' ', '-']).collect();
    if words.contains(&"MIG") {
        return None;
    }
    // Whole words: an A1000 is not an A100.
    let Sku { bf16, f32, .. } = SKUS.iter().find(|sku| {
        let wanted: Vec<&str> = sku.name.split([' ', '-']).collect();
        words.windows(wanted.len()).any(|part| part == wanted)
    })?;
    let tflops = match precision {
        Precision::Bf16 => *bf16,
        Precision::F32(Arithmetic::Tf32) => bf16 / 2.0,
        Precision::F32(Arithmetic::Full) => *f32,
    };
    Some(tflops * 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_drivers_are_found() {
        let bf16 = |name| flops(name, Precision::Bf16).map(|rate| (rate / 1e12).round());
        assert_eq!(bf16("NVIDIA H100 80GB HBM3"), Some(989.0));
        assert_eq!(bf16("NVIDIA H100 PCIe"), Some(756.0));
        assert_eq!(bf16("NVIDIA H200"), Some(989.0));
        assert_eq!(bf16("NVIDIA GH200 480GB"), Some(989.0));
        assert_eq!(bf16("NVIDIA A100-SXM4-80GB"), Some(312.0));
        assert_eq!(bf16("NVIDIA L40S"), Some(362.0));
        assert_eq!(bf16("NVIDIA L4"), Some(121.0));
        assert_eq!(bf16("NVIDIA A10G"), None);
        assert_eq!(bf16("NVIDIA H100 80GB HBM3 MIG 1g.10gb"), None);
        assert_eq!(bf16("NVIDIA A1000"), None);
        assert_eq!(bf16("Tesla V100-SXM2-32GB"), None);
        assert_eq!(flops("NVIDIA A100-SXM4-80GB", Precision::F32(Arithmetic::Full)), Some(19.5e12));
        assert_eq!(
            flops("NVIDIA H100 80GB HBM3", Precision::F32(Arithmetic::Tf32)),
            Some(494.7e12)
        );
    }

    #[test]
    fn boards_with_links_are_known_by_name() {
        for name in ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-80GB", "NVIDIA H200", "NVIDIA B200"]
        {
            assert_eq!(bus_bandwidth(name), Some(NVLINK_BANDWIDTH), "{name}");
        }
        for name in [
            "NVIDIA H100 PCIe",
            "NVIDIA H100 NVL",
            "NVIDIA A100-PCIE-40GB",
            "NVIDIA A100 80GB PCIe",
            "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
            "NVIDIA L40S",
            "NVIDIA A1000",
            "CPU simulator 0",
        ] {
            assert_eq!(bus_bandwidth(name), None, "{name}");
        }
    }
}
