//! Tests of the operations in `hpctrain_device::ops::optimizer`.

use crate::common::{Results, close, down, random, rounded, to_f64, up, up_f32};
use hpctrain_device::{AdamW, Elementwise, ElementwiseUpdate, Kernels, Sgd};

pub fn optimizers<B: Kernels>(b: &B) -> Results {
    let mut results = Vec::new();
    for len in [0, 1, 33, 20_001] {
        let g = random(b, 31, len);
        let m = random(b, 32, len);
        let p = random(b, 33, len);
        let v: Vec<f32> = random(b, 34, len).iter().map(|x| x * x).collect();
        let gb = up_f32(b, &g);
        let mut mb = up_f32(b, &m);
        let mut vb = up_f32(b, &v);
        let mut pb = up_f32(b, &p);
        let mut copy = up(b, &p);
        let u = AdamW {
            lr: 0.1,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.2,
            step: 3,
            grad_scale: 0.5,
        };
        let squares =
            b.adamw_step_squares(u, B::all(&gb), B::all(&mb), B::all(&vb), B::all(&pb)).unwrap();
        let m_view = B::all_mut(&mut mb);
        let v_view = B::all_mut(&mut vb);
        let p_view = B::all_mut(&mut pb);
        b.adamw(u, B::all(&gb), m_view, v_view, p_view, Some(B::all_mut(&mut copy)), None).unwrap();
        let [lr, beta1, beta2, decay] = [u.lr, u.beta1, u.beta2, u.weight_decay].map(f64::from);
        let mut want_m = vec![];
        let mut want_v = vec![];
        let mut want_p = vec![];
        for i in 0..len {
            let g = f64::from(g[i]) * 0.5;
            want_m.push(beta1 * f64::from(m[i]) + (1.0 - beta1) * g);
            want_v.push(beta2 * f64::from(v[i]) + (1.0 - beta2) * g * g);
            let m_hat = want_m[i] / (1.0 - beta1.powi(3));
            let v_hat = want_v[i] / (1.0 - beta2.powi(3));
            want_p.push(f64::from(p[i]) * (1.0 - lr * decay) - lr * m_hat / (v_hat.sqrt() + 1e-8));
        }
        let step = |(&p, want): (&f32, &f64)| (f64::from(p) - want) / lr;
        let expected: f64 = p.iter().zip(&want_p).map(step).map(|u| u * u).sum();
        let got = b.read(squares).unwrap();
        assert!(
            (got - expected).abs() <= 1e-5 * expected,
            "adamw step squares: {got} is not {expected}"
        );
        close(b, &mb, &want_m, "adamw m");
        close(b, &vb, &want_v, "adamw v");
        close(b, &pb, &want_p, "adamw p");
        assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
        results.extend([down(b, &mb), down(b, &vb), down(b, &pb)]);

        for nesterov in [false, true] {
            let mut mb = up_f32(b, &m);
            let mut pb = up_f32(b, &p);
            let u = Sgd { lr: 0.1, momentum: 0.9, nesterov, weight_decay: 0.2, grad_scale: 0.5 };
            b.sgd(u, B::all(&gb), B::all_mut(&mut mb), B::all_mut(&mut pb), None, None).unwrap();
            let mut want_m = vec![];
            let mut want_p = vec![];
            for i in 0..len {
                let [g, m, p] = [g[i], m[i], p[i]].map(f64::from);
                let g = g * 0.5 + f64::from(0.2f32) * p;
                let m = f64::from(0.9f32) * m + g;
                want_p.push(
                    p - f64::from(0.1f32) * if nesterov { g + f64::from(0.9f32) * m } else { m },
                );
                want_m.push(m);
            }
            close(b, &mb, &want_m, "sgd momentum");
            close(b, &pb, &want_p, "sgd p");
            results.extend([down(b, &mb), down(b, &pb)]);
        }

        let mut pb = up_f32(b, &p);
        let mut copy = up(b, &p);
        b.update_average(0.3, B::all(&gb), B::all_mut(&mut pb), Some(B::all_mut(&mut copy)), None)
            .unwrap();
        let want: Vec<f64> = to_f64(&p)
            .iter()
            .zip(to_f64(&g))
            .map(|(p, g)| p + f64::from(0.3f32) * (g - p))
            .collect();
        close(b, &pb, &want, "approach");
        assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
        results.push(down(b, &pb));

        for rule in [
            Elementwise::Adam { beta1: 0.9, beta2: 0.95, eps: 1e-8 },
            Elementwise::Adagrad { eps: 1e-6 },
            Elementwise::RmsProp { alpha: 0.9, eps: 1e-6, momentum: 0.8 },
            Elementwise::Lion { beta1: 0.9, beta2: 0.99 },
        ] {
            let u =
                ElementwiseUpdate { rule, lr: 0.1, weight_decay: 0.2, step: 3, grad_scale: 0.5 };
            let squares = matches!(rule, Elementwise::Adam { .. });
            let of_second = if squares {
                &v[..]
            } else if rule.states() == 2 {
                &m[..]
            } else {
                &[]
            };
            let of_first = if squares { &m[..] } else { &v[..] };
            let mut first = up_f32(b, of_first);
            let mut second = up_f32(b, of_second);
            let mut pb = up_f32(b, &p);
            let mut copy = up(b, &p);
            let one = B::all_mut(&mut first);
            let two = B::all_mut(&mut second);
            let to = B::all_mut(&mut pb);
            b.elementwise_update(u, B::all(&gb), one, two, to, Some(B::all_mut(&mut copy)), None)
                .unwrap();
            let mut want_first = vec![];
            let mut want_second = vec![];
            let mut want_p = vec![];
            for i in 0..len {
                let [raw, p] = [0.5 * g[i], p[i]].map(f64::from);
                let s = f64::from(of_first[i]);
                let t = of_second.get(i).map_or(0.0, |t| f64::from(*t));
                let lr = f64::from(0.1f32);
                let decay = f64::from(0.2f32);
                let coupled = raw + decay * p;
                let (s, t, p) = match rule {
                    Elementwise::Adam { beta1, beta2, eps } => {
                        let [b1, b2, eps] = [beta1, beta2, eps].map(f64::from);
                        let s = b1 * s + (1.0 - b1) * coupled;
                        let t = b2 * t + (1.0 - b2) * coupled * coupled;
                        let m_hat = s / (1.0 - b1.powi(3));
                        let v_hat = t / (1.0 - b2.powi(3));
                        (s, t, p - lr * m_hat / (v_hat.sqrt() + eps))
                    }
                    Elementwise::Adagrad { eps } => {
                        let s = s + coupled * coupled;
                        (s, t, p - lr * coupled / (s.sqrt() + f64::from(eps)))
                    }
                    Elementwise::RmsProp { alpha, eps, momentum } => {
                        let [alpha, eps, momentum] = [alpha, eps, momentum].map(f64::from);
                        let s = alpha * s + (1.0 - alpha) * coupled * coupled;
                        let t = momentum * t + coupled / (s.sqrt() + eps);
                        (s, t, p - lr * t)
                    }
                    Elementwise::Lion { beta1, beta2 } => {
                        let [b1, b2] = [beta1, beta2].map(f64::from);
                        let way = b1 * s + (1.0 - b1) * raw;
                        (b2 * s + (1.0 - b2) * raw, t, p * (1.0 - lr * decay) - lr * way.signum())
                    }
                };
                want_first.push(s);
                want_second.push(t);
                want_p.push(p);
            }
            close(b, &first, &want_first, &format!("{rule:?} first state"));
            if rule.states() == 2 {
                close(b, &second, &want_second, &format!("{rule:?} second state"));
            }
            close(b, &pb, &want_p, &format!("{rule:?} p"));
            assert_eq!(down(b, &copy), rounded(b, &down(b, &pb)));
            results.extend([down(b, &first), down(b, &second), down(b, &pb)]);
        }
    }
    results
}
